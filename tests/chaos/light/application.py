"""The light driver: takes `trainer/application.py`'s place, and does what Ray Train's controller does.

Starts one worker a node (STRICT_SPREAD), leads them step by step, writes Ray's commit record after each checkpoint that
all ranks reported, holds at the drill's commit, starts the attempt after a lost worker from the last commit, and
exports. `python train.py fail|stall` of the light workload calls `main` with what is to go wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.rank import commit_name, digest  # type: ignore[import-not-found]  # light/rank.py, once delivered

STEP_S = 0.12
GROUP_START_S = 6.0
"""How long a worker group waits for nodes and for its workers (Ray Train: 60 s)."""
MISBEHAVE_AFTER = 12
"""The commit after which `fail` and `stall` begin."""


class WorkerLost(Exception):
    """A training worker is gone: the attempt is over, the training is not."""


class Misbehaved(Exception):
    """What the workload was asked to get wrong."""


class Head:
    """The head of the light cluster, as `ray.init` reaches it."""

    def __init__(self) -> None:
        host, port = json.loads(os.environ["LIGHT_HEAD"])
        self._at = (str(host), int(port))
        self._token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text()

    def ask(self, method: str, path: str, told: Any = None, at: tuple[str, int] | None = None) -> Any:
        """One request, to the head or to a raylet. Raises OSError."""
        connection = http.client.HTTPConnection(*(at or self._at), timeout=10)
        try:
            body = None if told is None else json.dumps(told)
            connection.request(method, path, body, {"Authorization": f"Bearer {self._token}"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status >= 300:
                raise OSError(f"{method} {path}: {answer.status} {content[:200]!r}")
            return json.loads(content or b"null")
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()

    def nodes(self) -> list[dict[str, Any]]:
        """Nodes that are alive."""
        told = self.ask("GET", "/api/v0/nodes?detail=true&limit=10000")["data"]["result"]["result"]
        return [each for each in told if each["state"] == "ALIVE"]


class Group:
    """The workers of one attempt, by rank."""

    def __init__(self, lines: list[socket.socket]) -> None:
        self._lines = lines
        self._streams = [line.makefile("rwb") for line in lines]

    def all(self, do: str, **told: Any) -> None:
        """Have every rank do one thing, together. Raises WorkerLost, OSError where one could not."""
        for stream in self._streams:
            try:
                stream.write(json.dumps({"do": do, **told}).encode() + b"\n")
                stream.flush()
            except OSError as error:
                raise WorkerLost(f"{do}: {error}") from error
        for rank, stream in enumerate(self._streams):
            try:
                raw = stream.readline()
            except OSError:
                raw = b""
            if not raw:
                raise WorkerLost(f"rank {rank} died while it was to {do}")
            if failed := json.loads(raw).get("failed"):
                raise OSError(failed)

    def hold(self, limit_s: float) -> None:
        """Wait for the drill's kill. Raises WorkerLost; returns when nobody struck."""
        ready, _, _ = select.select(self._lines, [], [], limit_s)
        if ready:
            raise WorkerLost("a rank died while it was held for the drill")

    def close(self) -> None:
        """Hang up: workers end by themselves."""
        for line, stream in zip(self._lines, self._streams, strict=True):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                stream.close()
            line.close()


class Controller:
    """One training, from the first attempt to its exports."""

    def __init__(self, what: str) -> None:
        self.order = json.loads(os.environ["LANYARD_JOB"])
        self.what = what
        told = self.order["workload"]
        self.recipe = told.get("recipe") or told
        self.steps, self.interval = int(self.recipe["steps"]), int(self.recipe["checkpoint_interval"])
        self.store = storage.filesystem()
        self.root = self.order["storage"].removeprefix("s3://")
        self.place = f"{self.root}/train/{self.order['train_name']}"
        self.head = Head()
        self.commits: list[dict[str, Any]] = []
        self.attempt = 0
        self.journal: dict[int, dict[str, Any]] = {}

    def fit(self) -> None:
        """Train to the end, recovering as often as the order allows. Raises what ends the training."""
        joined = self.head.ask(
            "POST", "/light/driver", {"submission_id": self.order["submission_id"], "pid": os.getpid()}
        )
        self.job_id = joined["job_id"]
        failures = 0
        while True:
            try:
                self._attempt()
                return
            except WorkerLost as lost:
                failures += 1
                print(f"worker lost ({lost}); failure {failures}", flush=True)
                if failures > self.order["failures"]["worker"]:
                    raise

    def _attempt(self) -> None:
        self.attempt += 1
        group = self._start_group()
        try:
            group.all("start")
            for step in range(self._restored[0] + 1, self.steps + 1):
                group.all("step", step=step, seconds=STEP_S)
                self.journal[step] = {"step": step, "loss": 1.0 / step, "attempt": self.attempt}
                if step % self.interval == 0 or step == self.steps:
                    group.all("checkpoint", step=step)
                    self._commit(step)
                    self._after(step, group)
            group.all("final", step=self.steps)
        finally:
            group.close()

    @property
    def _restored(self) -> tuple[int, str | None]:
        if not self.commits:
            return 0, None
        return int(self.commits[-1]["metrics"]["step"]), str(self.commits[-1]["checkpoint_dir_name"])

    def _after(self, step: int, group: Group) -> None:
        drill = self.order["drill"]
        # An attempt that was restored at the drill's step, or later, is not held again.
        if drill and step == drill["after_step"] and self._started_at < step:
            print(f"drill: step {step} is committed; holding for the kill", flush=True)
            group.hold(drill["hold_s"])
        if step >= MISBEHAVE_AFTER and self.what == "fail":
            raise Misbehaved(f"the samples of step {step + 1} are damaged")
        if step >= MISBEHAVE_AFTER and self.what == "stall":
            group.hold(3600)

    def _start_group(self) -> Group:
        deadline = time.monotonic() + GROUP_START_S
        world = int(self.order["world_size"])
        while len(nodes := self.head.nodes()) < world:
            self.head.ask("POST", "/light/group", {"job_id": self.job_id, "state": "PENDING", "count": world})
            if time.monotonic() > deadline:
                raise TimeoutError(f"the worker group did not start: {world} nodes are needed, {len(nodes)} are alive")
            time.sleep(0.5)
        self.head.ask("POST", "/light/group", {"job_id": self.job_id, "state": "CREATED", "count": world})
        step, name = self._restored
        self._started_at = step
        with socket.create_server((os.environ["LIGHT_ADDRESS"], 0)) as server:
            server.settimeout(GROUP_START_S)
            for rank, node in enumerate(nodes[:world]):
                told = {
                    "order": self.order,
                    "rank": rank,
                    "attempt": self.attempt,
                    "restored_step": step,
                    "restored_from": name,
                    "node_id": node["node_id"],
                    "address": node["node_ip"],
                    "driver": list(server.getsockname()),
                }
                self._start_worker(node, told)
            lines: dict[int, socket.socket] = {}
            while len(lines) < world:
                try:
                    line, _ = server.accept()
                    hello = json.loads(line.makefile("rb").readline())
                except (OSError, ValueError) as error:
                    raise WorkerLost(f"only {len(lines)} of {world} workers began") from error
                lines[hello["rank"]] = line
        return Group([lines[rank] for rank in range(world)])

    def _start_worker(self, node: dict[str, Any], told: dict[str, Any]) -> None:
        order = {
            "command": [sys.executable, "-S", "-m", "trainer.rank"],
            "env": {"LIGHT_RANK": json.dumps(told)},
            "cwd": os.getcwd(),
            "log": f"{os.environ['TMPDIR']}/worker-{told['attempt']}-{told['rank']}.log",
        }
        started = self.head.ask("POST", "/start", order, at=(node["node_ip"], self._agent(node)))
        self.head.ask("POST", "/light/worker", {"job_id": self.job_id, "pid": started["pid"]})

    def _agent(self, node: dict[str, Any]) -> int:
        return int(node["labels"]["light/agent-port"])

    def _commit(self, step: int) -> None:
        metrics = {
            "step": step,
            "loss": 1.0 / step,
            "attempt": self.attempt,
            "steps": self.steps,
            "model_sha256": digest("model", step),
            "momentum_sha256": digest("momentum", step),
        }
        told = {"version": 0, "checkpoint_dir_name": commit_name(step, self.attempt), "metrics": metrics}
        self.commits.append(told)
        snapshot = {
            "ray_version": "2.58.0",
            "checkpoint_results": self.commits,
            "checkpoint_report_indices": list(range(len(self.commits))),
            "latest_checkpoint_result": told,
            "pending_training_results": [],
            "pending_validation_specs": [],
            "current_report_index": len(self.commits),
            "validated_checkpoint_dir_names": [],
            "timed_out_validation_checkpoint_dir_names": [],
            "failed_validation_checkpoint_dir_names": [],
        }
        self.store.put(f"{self.place}/checkpoint_manager_snapshot.json", json.dumps(snapshot).encode())

    def export(self) -> None:
        """The files of an export, the manifest last."""
        run = {name: self.order[name] for name in ("run_key", "submission_id", "train_name")}
        metrics = {"schema": 1, "run": run, "steps": [self.journal[step] for step in sorted(self.journal)]}
        result = {"schema": 1, "status": "succeeded", "run": run, "final_step": self.steps}
        files = {
            "state.pt": f"light state after step {self.steps}".encode(),
            "metrics.json": json.dumps(metrics).encode(),
            "metrics.rrd": b"light recording",
            "result.json": json.dumps(result).encode(),
        }
        lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items())]
        for name, data in {**files, "SHA256SUMS": "".join(lines).encode()}.items():
            storage.put_once(self.store, f"{self.root}/exports/{self.order['submission_id']}/{name}", data)


def main(what: str = "") -> int:
    """Train and export; the exit status of the real driver."""
    try:
        controller = Controller(what)
        controller.fit()
        controller.export()
    except Exception as error:
        print(f"lanyard: failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    print("lanyard: succeeded", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
