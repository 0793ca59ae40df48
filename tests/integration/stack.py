"""The embedded stack of this checkout, as a user has it: `python -m worker stack`, its env file, the `temporal` CLI."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import botocore.config

CHECKOUT = Path(__file__).resolve().parents[2]
BUCKET = "lanyard"
BUSY_TRIES = 10
PATIENCE = 4
"""Machines that test are slow and shared: every wait is this many times what a quiet two-core machine needs. What is
asserted does not depend on it."""
STATUS = "WORKFLOW_EXECUTION_STATUS_"


@dataclass(frozen=True)
class Started:
    """One run, by its exact ids."""

    workflow_id: str
    run_id: str
    namespace: str


class Stack:
    """One stack in a home of its own."""

    def __init__(self, root: Path) -> None:
        self.home = root / "home"
        self.scratch = root / "scratch"
        self.scratch.mkdir(mode=0o700)
        self.output = root / "stack.out"
        self.mark = f"it{secrets.token_hex(3)}"
        """Begins every workflow id, and so every run key, of this session."""
        self.env: dict[str, str] = {}
        self.namespaces = ["default"]
        self._process: subprocess.Popen[bytes] | None = None
        self._others: list[subprocess.Popen[bytes]] = []

    # -- up and down

    def start(self) -> None:
        """Also again, after it was killed."""
        before = self.output.stat().st_size if self.output.exists() else 0
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "worker", "stack"],
                cwd=CHECKOUT,
                env={**bare(), "LANYARD_HOME": str(self.home), "TMPDIR": str(self.scratch)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_us,
            )
        self._until(lambda: b"Ctrl-C here stops" in self.output.read_bytes()[before:], 60, "the stack is up")
        told = subprocess.run(
            ["bash", "-euc", '. "$1"; exec env -0', "bash", str(self.home / "env")],
            env={"PATH": os.defpath, "HOME": os.environ.get("HOME", "/")},
            capture_output=True,
            check=True,
        )
        self.env = dict(part.split("=", 1) for part in told.stdout.decode().split("\0") if part)

    def stop(self) -> int:
        """The supervisor's exit status after Ctrl-C."""
        process = self._process
        assert process is not None
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30 * PATIENCE)
        if process.poll() is None:
            process.kill()
        return process.wait()

    def end_runs(self) -> list[str]:
        """Terminate the runs that are still open, which a test that failed leaves, and wait until their custody has
        released everything; returns their workflow ids."""
        open_now = "ExecutionStatus = 'Running' AND WorkflowType = '{}'"
        ended = []
        for each in self.asked("workflow", "list", "--query", open_now.format("GuardedTrain")):
            ended.append(each["execution"]["workflowId"])
            self.cli("workflow", "terminate", "--workflow-id", ended[-1], check=False)
        self._until(lambda: not self.asked("workflow", "list", "--query", open_now.format("Custody")), 60, "release")
        return ended

    def services(self) -> list[int]:
        """Pids of the supervisor, of its services now, and of workers that tests started beside them."""
        record = json.loads((self.home / "stack.json").read_bytes())
        pids = [int(each["process"]["pid"]) for each in record["services"].values()]
        own = [self._process.pid] if self._process else []
        return [*own, *pids, *(each.pid for each in self._others)]

    def worker_pid(self) -> int:
        record = json.loads((self.home / "stack.json").read_bytes())
        return int(record["services"]["worker"]["process"]["pid"])

    @contextlib.contextmanager
    def another_worker(self, namespace: str, **environment: str | None) -> Iterator[None]:
        """A worker in a namespace of its own, its environment changed. None unsets a variable."""
        self.namespace(namespace)
        env = {**bare(), **self.env, "TEMPORAL_NAMESPACE": namespace, "TMPDIR": str(self.scratch)}
        for name, value in environment.items():
            env.pop(name, None)
            if value is not None:
                env[name] = value
        log = self.output.with_name(f"worker-{namespace}.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "worker", "run"],
                cwd=CHECKOUT,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_us,
            )
        self._others.append(process)
        try:
            ends = time.monotonic() + 30 * PATIENCE
            while b"worker ready" not in log.read_bytes():
                assert process.poll() is None, f"the worker ended:\n{log.read_text()}"
                assert time.monotonic() < ends, f"the worker is not ready:\n{log.read_text()}"
                time.sleep(0.1)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15 * PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._others.remove(process)

    def namespace(self, name: str) -> None:
        """Make it unless it is there, and wait until it can be used."""
        if name in self.namespaces:
            return
        self.cli("operator", "namespace", "create", "--namespace", name, "--retention", "1d")
        self.namespaces.append(name)
        ends = time.monotonic() + 30 * PATIENCE
        while self.cli("workflow", "list", "--namespace", name, check=False).returncode != 0:
            assert time.monotonic() < ends, f"namespace {name} cannot be used"
            time.sleep(0.2)

    # -- the CLI

    def cli(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`temporal ARGS`, in the environment that the env file gives a shell."""
        for _ in range(BUSY_TRIES):
            done = subprocess.run(
                ["temporal", *args],
                env=self.env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60 * PATIENCE,
                check=False,
            )
            # The server's word on a query that meets a workflow task on a loaded machine; it asks to be asked again.
            if "Workflow is busy" not in done.stderr:
                break
            time.sleep(1)
        assert not check or done.returncode == 0, f"temporal {' '.join(args)}:\n{done.stdout}{done.stderr}"
        return done

    def asked(self, *args: str) -> Any:
        return json.loads(self.cli(*args, "-o", "json").stdout)

    def begin(self, name: str, *inputs: str, namespace: str = "default", given: tuple[str, ...] = ()) -> Started:
        """`temporal workflow start` with these inputs; the workflow id is the session's mark and `name`."""
        command = ("workflow", "start", "--type", "GuardedTrain", "--task-queue", "ray-train")
        parts = [part for each in inputs for part in ("--input", each)]
        told = self.asked(*(*command, "--workflow-id", f"{self.mark}-{name}", "--namespace", namespace, *parts, *given))
        return Started(told["workflowId"], told["runId"], namespace)

    def train(self, name: str, run: Mapping[str, Any], namespace: str = "default") -> Started:
        """`temporal workflow start --input-file`, as the README says."""
        path = self.scratch.parent / f"{name.replace('/', '-')}.json"
        path.write_text(json.dumps(run))
        return self.begin(name, namespace=namespace, given=("--input-file", str(path)))

    def at(self, run: Started) -> tuple[str, ...]:
        return ("--workflow-id", run.workflow_id, "--run-id", run.run_id, "--namespace", run.namespace)

    def describe(self, run: Started) -> dict[str, Any]:
        told: dict[str, Any] = self.asked("workflow", "describe", *self.at(run))
        return told

    def status(self, run: Started) -> str:
        return str(self.describe(run)["workflowExecutionInfo"]["status"]).removeprefix(STATUS)

    def query(self, run: Started, name: str) -> Any:
        """The answer. The CLI prints an empty list as null."""
        return self.asked("workflow", "query", *self.at(run), "--type", name)["queryResult"][0]

    def result(self, run: Started) -> dict[str, Any]:
        """The result of a Completed run, from its payload in the history."""
        [*_, last] = self.events(run)
        assert last["eventType"] == "EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED", last
        found = _decoded(last["workflowExecutionCompletedEventAttributes"]["result"])
        assert isinstance(found, dict), found
        return found

    def failure(self, run: Started) -> tuple[str, str, dict[str, Any]]:
        """Type and message of a Failed run, and the verdict in its details."""
        [*_, last] = self.events(run)
        assert last["eventType"] == "EVENT_TYPE_WORKFLOW_EXECUTION_FAILED", last
        found = last["workflowExecutionFailedEventAttributes"]["failure"]
        about = found["applicationFailureInfo"]
        return about["type"], found["message"], _decoded(about["details"])

    def events(self, run: Started) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = self.asked("workflow", "show", *self.at(run))["events"]
        return told

    def custody(self, run: Started) -> Started:
        """The run's custody: its only child, by the run's own history."""
        for event in self.events(run):
            told = event.get("childWorkflowExecutionStartedEventAttributes")
            if told:
                found = told["workflowExecution"]
                return Started(found["workflowId"], found["runId"], run.namespace)
        raise AssertionError(f"{run} has started no custody")

    def reap(self) -> None:
        """Have the reaper look now. Where one is under way, which only the first seconds of every fifth minute can
        bring, that one looks."""
        self.cli("schedule", "trigger", "--schedule-id", f"reaper-{self.env['LANYARD_DEPLOYMENT']}")

    def reopened(self, custody: Started, quiet_s: float) -> Started:
        """The next execution of this custody's id, once there is one."""
        found = [custody.run_id]

        def another() -> bool:
            told = self.asked("workflow", "describe", "--workflow-id", custody.workflow_id)
            found.append(told["workflowExecutionInfo"]["execution"]["runId"])
            return found[-1] != custody.run_id

        self._until(another, quiet_s, f"{custody.workflow_id} is started again", custody)
        return Started(custody.workflow_id, found[-1], custody.namespace)

    def key_of(self, run: Started) -> str:
        return self.custody(run).workflow_id.removeprefix("custody-")

    def last_word(self, run: Started) -> dict[str, Any]:
        """The result of the run's custody, once that has closed."""
        custody = self.custody(run)
        self.wait(custody, 60)
        return self.result(custody)

    # -- waiting

    def wait(self, run: Started, quiet_s: float) -> dict[str, Any]:
        """Until it is closed; what `describe` says then. `quiet_s`: what a quiet two-core machine needs."""
        self._until(lambda: self.status(run) != "RUNNING", quiet_s, f"{run.workflow_id} closes", run)
        return self.describe(run)

    def wait_for(self, run: Started, what: str, holds: Callable[[dict[str, Any]], bool], quiet_s: float) -> float:
        """Until the query `progress`, or a heartbeat that is fresher, says so; returns when (monotonic)."""

        def seen() -> bool:
            told = self.describe(run)
            status = str(told["workflowExecutionInfo"]["status"]).removeprefix(STATUS)
            assert status == "RUNNING", f"{run.workflow_id} was {status} before {what}: {ending(told)}"
            return holds({**self.query(run, "progress"), **_heartbeats(told)})

        self._until(seen, quiet_s, f"{run.workflow_id}: {what}", run)
        return time.monotonic()

    def _until(self, holds: Callable[[], bool], quiet_s: float, what: str, run: Started | None = None) -> None:
        ends = time.monotonic() + quiet_s * PATIENCE
        while not holds():
            assert self._process is not None
            assert self._process.poll() is None, f"the stack ended:\n{self.output.read_text()}"
            if time.monotonic() > ends:
                told = json.dumps(self.describe(run), indent=1) if run else self.output.read_text()
                raise AssertionError(f"not within {quiet_s * PATIENCE:.0f} s: {what}\n{told[:6000]}")
            time.sleep(0.3)

    # -- storage

    @functools.cached_property
    def s3(self) -> Any:
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.env["AWS_ENDPOINT_URL"],
            region_name=self.env["AWS_REGION"],
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
            config=botocore.config.Config(
                proxies={},
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def names(self, prefix: str) -> list[str]:
        """Keys below a prefix of the bucket."""
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [each["Key"] for page in pages for each in page.get("Contents", ())]

    def get(self, key: str) -> bytes:
        return bytes(self.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def put(self, key: str, body: bytes) -> None:
        self.s3.put_object(Bucket=BUCKET, Key=key, Body=body)


def _decoded(payloads: Mapping[str, Any]) -> Any:
    [payload] = payloads["payloads"]
    return json.loads(base64.b64decode(payload["data"]))


def ending(told: Mapping[str, Any]) -> str:
    return json.dumps(told.get("closeEvent"), indent=1)[:3000]


def bare() -> dict[str, str]:
    """This process's environment without what configures a client of another stack, or a Ray client."""
    prefixes = ("LANYARD_", "TEMPORAL_", "AWS_", "RAY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    environments = os.environ.get("LANYARD_ENVIRONMENTS")
    return {**kept, **({"LANYARD_ENVIRONMENTS": environments} if environments else {})}


def _heartbeats(told: Mapping[str, Any]) -> dict[str, Any]:
    """What pending activities say of step and loss: fresher than the run's own answer."""
    live: dict[str, Any] = {}
    for activity in told.get("pendingActivities", ()):
        details = activity.get("heartbeatDetails")
        for each in details if isinstance(details, list) else [details]:
            if isinstance(each, dict):
                live.update({name: each[name] for name in ("step", "note") if each.get(name) is not None})
    return live


def end_with_us() -> None:
    """The kernel asks a child to end when the test process dies, however it dies (a test's time-out exits at once)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
