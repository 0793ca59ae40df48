"""The hosting service: one process per host that prepares it, runs its Ray node, and ends everything it started.

    python -m trainer.hosting --order FILE [--detach]

It ends, and takes every descendant along, when it is told to (SIGTERM, or `hosts/end.json`), when it finds the run's
tombstone, when the run's lease runs out, when its hard `not_after` has passed, and when its Ray node dies; nothing is
started without a live lease. An outage of storage that is shorter than the lease stops nothing. What it is doing, and
why it ended, is in `service.json` in its private directory.

The first half is standard library only: private directory, application environment. The process then becomes (exec,
same pid) one of the application's interpreter, for the storage client.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer import environment, ray_node
from trainer.lease import LeaseWatch, Observation, boot_clock
from trainer.machine import boot_id, host_fingerprint
from trainer.private import NotPrivate, create_private_directory, read_private_file, write_private_file
from trainer.processes import this_process
from trainer.supervision import Supervisor, bound_log, read_tail

if TYPE_CHECKING:
    import pyarrow.fs as pafs

Order = Mapping[str, Any]
"""A host's order, JSON: see `ORDER_FIELDS`. It holds no secret, only the path of the token's file."""

ORDER_FIELDS: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "run_key": str,
    "index": int,
    "role": str,  # head | worker
    "device": str,  # cpu | cuda
    "storage": str,  # s3://bucket/prefix/<run key>
    "private_dir": str,  # created fresh by the service
    "temp_dir": str,  # Ray's, created fresh; short, because sockets below it have at most 107 characters
    "shared_memory_dir": str,  # the object store's, created fresh; empty: Ray's own choice
    "token_file": str,  # 0600; copied into the private directory
    "address": str,  # the node's own
    "interface": str,  # for gloo and nccl; empty: their own choice
    "gpus": list,  # CUDA device ids, as strings
    "environments": str,  # root of application environments; empty: the default
    "not_after_s": (int, float),
    "ray": dict,
}
RAY_FIELDS: dict[str, type | tuple[type, ...]] = {
    "head_address": str,
    "gcs_port": int,
    "dashboard_host": str,
    "dashboard_port": int,
    "agent_port": int,
    "client_port": int,
    "runtime_env_port": int,
    "worker_ports": list,  # [lowest, highest]; [0, 0]: any free one
    "num_cpus": int,
    "object_store_bytes": int,
}

ENDING_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
REFUSED = 78
"""Exit code when nothing was touched: a bad order, or a private directory that is not to be trusted."""
LONGEST_TEMP_DIR = 30
"""Characters: `<temp dir>/r/session_<26>_<pid 7>/sockets/<16>` must stay within a socket path's 107."""


@dataclass(frozen=True)
class Timing:
    """Every bound of the service, in seconds."""

    look_every_s: float = 2.0
    """Between two looks at lease and tombstone."""
    tombstone_grace_s: float = 90.0
    """How long a *running* host leaves the release to its order (job, then service, then cluster) once it sees the
    tombstone. One that has not started yet ends at once; so does every driver (lease keeper)."""
    lease_wait_s: float = 60.0
    """How long a host waits, with nothing started, for the run's first lease to appear."""
    start_s: float = 240.0
    """From `ray start` to a node that answers; also how long a worker waits for its head's port."""
    receipt_s: float = 120.0
    """How long storage may refuse the receipt."""
    grace_s: float = 6.0
    """What `ray start` gets to take its own processes down (facts: 3 to 39 s); then they are killed."""
    kill_s: float = 20.0
    """How long killed processes may take to go."""


END = "hosts/end.json"
"""Below the run's root in storage: with the tombstone, it has every host of the run end itself."""

KEPT_LOGS = (
    "raylet.out",
    "raylet.err",
    "gcs_server.out",
    "gcs_server.err",
    "dashboard.log",
    "dashboard.err",
    "monitor.log",
)


class Ended(Exception):
    """The service must end now. ``failed`` tells a fault from an order."""

    def __init__(self, reason: str, detail: str, *, failed: bool = False) -> None:
        super().__init__(detail)
        self.reason, self.detail, self.failed = reason, detail, failed


class BadOrder(Exception):
    """The order file does not say what it must."""


def read_order(path: Path) -> dict[str, Any]:
    """Read and check a host's order. Raises BadOrder or NotPrivate."""
    try:
        order = json.loads(read_private_file(path, "the host's order"))
    except ValueError as error:
        raise BadOrder(f"{path} is not JSON: {error}") from error
    if not isinstance(order, dict):
        raise BadOrder(f"{path} holds no JSON object")
    _check_fields(order, ORDER_FIELDS, "")
    _check_fields(order["ray"], RAY_FIELDS, "ray.")
    if order["schema"] != 1 or order["role"] not in ("head", "worker") or order["device"] not in ("cpu", "cuda"):
        raise BadOrder("schema must be 1, role head or worker, device cpu or cuda")
    if len(order["temp_dir"]) > LONGEST_TEMP_DIR:
        # Ray says it started and its dashboard dies: the path of a socket below it would be too long.
        raise BadOrder(
            f"temp_dir {order['temp_dir']} is longer than {LONGEST_TEMP_DIR} characters; choose a shorter one"
        )
    return order


def _check_fields(found: Mapping[str, Any], wanted: Mapping[str, type | tuple[type, ...]], prefix: str) -> None:
    for name, kind in wanted.items():
        if name not in found:
            raise BadOrder(f"the order lacks {prefix}{name}")
        if not isinstance(found[name], kind) or isinstance(found[name], bool):
            raise BadOrder(f"the order's {prefix}{name} has the wrong type")
    if unknown := set(found) - set(wanted):
        raise BadOrder(f"the order has unknown fields: {', '.join(sorted(unknown))}")


class State:
    """`service.json`: who the service is and what it is doing, for whoever adopts, proves or ends it."""

    def __init__(self, order: Order) -> None:
        me = this_process()
        self.path = Path(order["private_dir"]) / "service.json"
        self._facts: dict[str, Any] = {
            "schema": 1,
            "run_key": order["run_key"],
            "index": order["index"],
            "role": order["role"],
            "pid": me.pid,
            "start_time": me.start_time,
            "boot_id": boot_id(),
            "temp_dir": order["temp_dir"],
            "shared_memory_dir": order["shared_memory_dir"],
            "node_id": None,
        }

    def write(self, state: str, reason: str = "", detail: str = "", **facts: Any) -> None:
        """Replace the file. States: preparing, waiting, starting, ready, ending, ended, failed."""
        self._facts |= {"state": state, "reason": reason, "detail": detail, "since": utc_now(), **facts}
        write_private_file(self.path, json.dumps(self._facts, indent=1).encode())
        print(f"{utc_now()} {state} {reason} {detail}".rstrip(), file=sys.stderr, flush=True)


def utc_now() -> str:
    """Now, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def prepare(order: Order) -> Path:
    """First half: the private directory, then the application environment; returns its interpreter.

    Raises NotPrivate before anything was touched, or Ended after the state was begun.
    """
    private = Path(order["private_dir"])
    create_private_directory(private)
    state = State(order)
    state.write("preparing")
    try:
        root = Path(order["environments"]) if order["environments"] else None
        target = environment.ensure(
            root, device=order["device"], say=lambda line: print(line, file=sys.stderr, flush=True)
        )
        record = json.loads((target / environment.RECORD).read_bytes())
    except (environment.EnvironmentBroken, NotPrivate, OSError) as error:
        state.write("failed", "environment", str(error))
        raise Ended("environment", str(error), failed=True) from error
    write_private_file(private / "environment.json", json.dumps(record, indent=1).encode())
    return environment.interpreter(target)


class Service:
    """Second half, in the application's interpreter: lease, Ray, receipt, supervision, the end.

    ``store`` is the storage's filesystem, ``observe`` one look at lease and tombstone, ``command`` the node's command
    and ``ask`` returns its node id once it answers: all of them are what the module's own `serve` passes, and what
    tests replace to have a light process in place of Ray. ``told_to_end`` is asked once the tombstone stands: whoever
    cannot send this process a signal leaves it a word in storage.
    """

    def __init__(
        self,
        order: Order,
        *,
        observe: Callable[[], Observation],
        put_receipt: Callable[[bytes], object],
        command: list[str],
        ask: Callable[[str], str | None],
        told_to_end: Callable[[], bool] = lambda: False,
        timing: Timing = Timing(),
    ) -> None:
        self.order = order
        self.private = Path(order["private_dir"])
        self.state = State(order)
        self.lease = LeaseWatch(boot_clock, observe)
        self._put_receipt, self._command, self._ask = put_receipt, command, ask
        self._told_to_end = told_to_end
        self._timing = timing
        self._told = ""
        self._made: list[Path] = []
        self._started = boot_clock()
        self._serving = False
        self._tombstone_seen: float | None = None
        self._supervisor = Supervisor()

    def run(self) -> int:
        """Serve until the end; 0 when it ended as ordered, 1 when it failed."""
        for number in ENDING_SIGNALS:
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._look_for_ever, name="lease", daemon=True).start()
        end: Ended
        try:
            self._wait_for_lease()
            self._prepare()
            self._start_until_ready()
            self._serving = True
            while True:
                self._pause(0.2)
        except Ended as ended:
            end = ended
        except Exception as error:
            # Whatever went wrong, what was started is ended below.
            end = Ended("fault", f"{type(error).__name__}: {error}", failed=True)
        return self._end(end)

    def _on_signal(self, number: int, frame: object) -> None:
        self._told = signal.Signals(number).name

    def _look_for_ever(self) -> None:
        # A thread, because storage may take minutes to answer and the decisions below must not wait for it.
        while True:
            with contextlib.suppress(Exception):
                self.lease.look()
                if not self._told and self.lease.standing().state == "tombstoned" and self._told_to_end():
                    self._told = "a word in storage"
            time.sleep(self._timing.look_every_s)

    def _pause(self, seconds: float) -> None:
        """Wait, reaping; raise Ended as soon as there is a reason to end."""
        time.sleep(seconds)
        status = self._supervisor.reap()
        bound_log(self.private / "ray.log")
        if self._told:
            raise Ended("told", f"told to end by {self._told}")
        standing = self.lease.standing()
        if standing.state == "tombstoned" and self._tombstone_counts():
            raise Ended("tombstone", standing.detail)
        if standing.state == "expired":
            raise Ended("lease_expired", standing.detail)
        if boot_clock() - self._started > self.order["not_after_s"]:
            raise Ended("not_after", f"the hard end, {self.order['not_after_s']:g} s after the start, has come")
        if status is not None:
            said = readable(read_tail(self.private / "ray.log", 1500))
            raise Ended("ray_ended", f"`ray start` ended with {status}: {' / '.join(said[-6:])}", failed=True)

    def _tombstone_counts(self) -> bool:
        now = boot_clock()
        self._tombstone_seen = self._tombstone_seen or now
        return not self._serving or now - self._tombstone_seen > self._timing.tombstone_grace_s

    def _wait(self, limit_s: float, what: str, done: Callable[[], bool], every_s: float = 0.2) -> None:
        deadline = boot_clock() + limit_s
        while not done():
            if boot_clock() > deadline:
                raise Ended("start_timeout", f"{what} took longer than {limit_s:.0f} s", failed=True)
            self._pause(every_s)

    def _wait_for_lease(self) -> None:
        self.state.write("waiting", "lease", "for the run's lease; nothing is started before")
        try:
            self._wait(
                self._timing.lease_wait_s, "the run's lease to appear", lambda: self.lease.standing().may_start, 0.1
            )
        except Ended as ended:
            if ended.reason == "start_timeout":
                raise Ended(
                    "no_lease",
                    f"no live lease within {self._timing.lease_wait_s:.0f} s: {self.lease.standing().detail}",
                ) from None
            raise

    def _prepare(self) -> None:
        order = self.order
        self._token = read_private_file(Path(order["token_file"]), "the run's token").decode().strip()
        write_private_file(ray_node.token_path(order), self._token.encode())
        for name in ("temp_dir", "shared_memory_dir"):
            if order[name]:
                try:
                    create_private_directory(Path(order[name]))
                except NotPrivate as error:
                    raise Ended("directory", str(error), failed=True) from error
                self._made.append(Path(order[name]))
        if order["role"] == "worker":
            ray = order["ray"]
            self.state.write("waiting", "head", f"for the head at {ray_node.gcs_address(order)}")
            self._wait(
                self._timing.start_s,
                f"the head at {ray_node.gcs_address(order)} to listen",
                lambda: ray_node.listens(ray["head_address"], ray["gcs_port"]),
            )

    def _start_until_ready(self) -> None:
        """On a busy machine `ray start` gives up after limits of its own (30 s for a raylet that no setting moves, or a
        worker that came before its head had registered): it gets a second try."""
        for last in (False, True):
            self.state.write("starting", detail="for the second time" if last else "")
            self._supervisor.start(
                self._command,
                ray_node.environment(self.order, Path(sys.executable), os.environ),
                self.private,
                self.private / "ray.log",
            )
            try:
                self._wait_until_ready()
                return
            except Ended as ended:
                if last or ended.reason != "ray_ended":
                    raise
                print(f"{utc_now()} {ended.detail}", file=sys.stderr, flush=True)
                self._end_attempt()

    def _end_attempt(self) -> None:
        """Nothing of a node that did not start may meet the next one. Raises Ended."""
        left = self._supervisor.end(self._timing.grace_s, self._timing.kill_s)
        self._keep_logs()
        if left:
            raise Ended("ray_ended", f"could not end {', '.join(str(each.pid) for each in left)}", failed=True)
        for directory in self._made:
            shutil.rmtree(directory, ignore_errors=True)
            try:
                create_private_directory(directory)
            except NotPrivate as error:
                raise Ended("directory", str(error), failed=True) from error

    def _wait_until_ready(self) -> None:
        node_id: str | None = None

        def answered() -> bool:
            nonlocal node_id
            try:
                node_id = self._ask(self._token)
            except PermissionError as error:
                raise Ended("token_refused", str(error), failed=True) from error
            return node_id is not None

        self._wait(self._timing.start_s, "Ray to answer", answered)
        receipt = json.dumps(self._receipt(str(node_id)), indent=1).encode()
        write_private_file(self.private / "receipt.json", receipt)
        problem = ""

        def stored() -> bool:
            nonlocal problem
            try:
                self._put_receipt(receipt)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                return False
            return True

        try:
            self._wait(self._timing.receipt_s, "writing the receipt to storage", stored, 1.0)
        except Ended as ended:
            if ended.reason == "start_timeout":
                raise Ended("receipt", f"the receipt cannot be written to storage: {problem}", failed=True) from None
            raise
        self.state.write("ready", node_id=node_id)

    def _receipt(self, node_id: str) -> dict[str, Any]:
        record = json.loads((self.private / "environment.json").read_bytes())
        me = this_process()
        versions = {name: record["versions"].get(name) for name in environment.DISTRIBUTIONS}
        return {
            "schema": 1,
            "run_key": self.order["run_key"],
            "index": self.order["index"],
            "role": self.order["role"],
            "address": self.order["address"],
            "host": {"fingerprint": host_fingerprint(), "hostname": socket.gethostname()},
            "process": {"pid": me.pid, "start_time": me.start_time, "boot_id": boot_id()},
            "ray": {
                "node_id": node_id,
                "dashboard_url": ray_node.dashboard_url(self.order) if self.order["role"] == "head" else None,
                "version": versions["ray"],
            },
            "versions": {**versions, "torch": record["torch"], "python": record["python"]},
            "environment": record["requirements_hash"],
            "freeze_sha256": record["freeze_sha256"],
            "at": utc_now(),
        }

    def _end(self, end: Ended) -> int:
        for number in ENDING_SIGNALS:
            # Told again, also while the interpreter shuts down, it goes on ending.
            signal.signal(number, signal.SIG_IGN)
        self.state.write("ending", end.reason, end.detail)
        left = self._supervisor.end(self._timing.grace_s, self._timing.kill_s)
        self._keep_logs()
        for directory in self._made:
            shutil.rmtree(directory, ignore_errors=True)
        ray_node.token_path(self.order).unlink(missing_ok=True)
        remains = [str(each.pid) for each in left] + [str(each) for each in self._made if each.exists()]
        detail = end.detail + (f"; could not end or remove: {', '.join(remains)}" if remains else "")
        failed = end.failed or bool(remains)
        self.state.write("failed" if failed else "ended", end.reason, detail)
        return 1 if failed else 0

    def _keep_logs(self) -> None:
        """The tails of Ray's own logs outlive its temporary directory, as evidence."""
        logs = ray_node.ray_temp_dir(self.order) / "session_latest" / "logs"
        kept = self.private / "ray-logs"
        for name in KEPT_LOGS:
            if tail := read_tail(logs / name, 64 * 2**10):
                kept.mkdir(mode=0o700, exist_ok=True)
                write_private_file(kept / name, tail)


def readable(log: bytes) -> list[str]:
    """The lines of a log that say something to a person: without colours, and without those that only point or rule."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log.decode(errors="replace"))
    return [line.strip() for line in plain.splitlines() if re.search(r"\w", line)]


def serve(order: Order) -> int:
    """Second half on real parts: storage through Arrow, Ray's own command."""
    from trainer import storage

    bucket_path = order["storage"].partition("://")[2]
    # Short timeouts: a look that hangs would be a look that is missing.
    store: pafs.FileSystem = storage.filesystem(
        connect_timeout_s=5, request_timeout_s=10, attempts=storage.HASTY_ATTEMPTS
    )
    receipt_path = storage.join(bucket_path, f"hosts/{order['index']}/receipt.json")
    os.chdir(order["private_dir"])
    return Service(
        order,
        observe=lambda: storage.observe_lease(store, bucket_path),
        put_receipt=lambda data: storage.put_once(store, receipt_path, data),
        command=ray_node.command(Path(sys.executable), order),
        ask=ray_node.asker(order, Path(sys.executable)),
        told_to_end=lambda: storage.exists(store, storage.join(bucket_path, END)),
    ).run()


def detach() -> None:
    """Leave the caller's session and parentage; the caller's own child ends at once, with 0."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.hosting", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--order", type=Path, required=True, help="the host's order, a JSON file of mode 0600")
    parser.add_argument("--detach", action="store_true", help="run on in the background")
    parser.add_argument("--prepared", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    os.umask(0o077)
    try:
        order = read_order(options.order)
        if options.prepared:
            code = serve(order)
            sys.stderr.flush()
            os._exit(code)  # not held up by a look at storage that is still waiting for an answer
        if options.detach:
            detach()
        python = prepare(order)
    except (BadOrder, NotPrivate) as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
        return REFUSED
    except Ended:
        return 1
    return _go_on_in(python, order, options.order)


def _go_on_in(python: Path, order: Order, order_file: Path) -> NoReturn:
    """Become the second half: the same process in the application's interpreter."""
    os.chdir(Path(__file__).parents[1])
    inherited = {**os.environ, ray_node.CUSTODY_MARK: order["run_key"]}
    again = [str(python), "-B", "-m", "trainer.hosting", "--order", str(order_file.absolute()), "--prepared"]
    os.execve(python, again, inherited)  # noqa: S606


if __name__ == "__main__":
    sys.exit(main())
