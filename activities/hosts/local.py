"""Hosts on this machine: hosting services detached from the worker, each with a loopback address of its own.

The same service that a rented host runs. One machine stays one machine: what runs here is never evidence of two.

Everything of a run lies under `<home>/hosts/<run key>/`: first of all `mark.json` (whose it is), then `plan.json`
(addresses and ports, written once by whoever comes first), each host's order, token and log, and each host's private
directory `<index>/`, which the service itself creates. That creation is what decides between two launches at once: the
second service finds the directory and refuses. After release, orders and tokens are gone, and states and bounded logs
stay as evidence.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from activities.hosts import (
    AbsenceUnknown,
    HostsError,
    HostsFailed,
    HostsNotReady,
    MaySend,
    Offer,
    Progress,
    WrongContext,
    proof,
)
from activities.hosts import plan as plans
from activities.hosts.census import Census, Sight, listeners, sights
from activities.hosts.lock import locked
from activities.hosts.marks import read_mark, write_mark
from activities.jobs import Endpoint
from activities.token import run_token
from trainer import environment
from trainer.private import (
    NotPrivate,
    check_parents,
    check_private_directory,
    create_private_directory,
    write_private_file,
)
from trainer.processes import Process, is_alive, look_up
from trainer.ray_node import CUSTODY_MARK
from trainer.supervision import read_tail
from workflows.evidence import Claim, ClaimKind, Hosts, HostsOrder, Inventory, Mark, StepTaken

SOURCE = Path(environment.__file__).parents[1]
"""The directory that holds the `trainer` package."""
SEND_WINDOW_S = 120.0
LONGEST_REQUEST_S = 30.0
"""A spawned service shows itself (process, mark) at once; this is for a machine under heavy load."""
LOCK_WAIT_S = 30.0
LAUNCH_PATIENCE_S = 2.0
BIRTH_LIMIT_S = 60.0
UNSEEN_LIMIT_S = 3.0
"""A service that is coming to life replaces its program, and /proc shows no arguments at that moment (measured: a look
met it). Only one that stays unseen is gone."""
PATIENCE_S = 30.0
KILL_LIMIT_S = 20.0
INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|LD_LIBRARY_PATH|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|XDG_CACHE_HOME"
    r"|LANYARD_ENVIRONMENTS|PIP_\w+|AWS_\w+|NVIDIA_\w+"
)
"""What of the worker's environment a host gets: storage's credentials, never Temporal's."""


class LocalHosts:
    """The provider `local`. Linux only.

    ``home`` is LANYARD_HOME; ``secret`` the deployment secret; ``read`` reads storage; ``service`` is the command of
    the hosting service, to which ``--order FILE --detach`` is added.
    """

    name = "local"

    def __init__(
        self,
        home: Path,
        secret: bytes,
        *,
        read: proof.ReadObject = proof.read_object,
        service: Sequence[str] = (sys.executable, "-m", "trainer.hosting"),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._home = Path(os.path.realpath(home))
        self._secret = secret
        self._read = read
        self._service = list(service)
        self._environ = os.environ if environ is None else environ

    def context(self, order: HostsOrder) -> str:
        """This machine (whatever boot), this user, this home, whatever the order."""
        machine = hashlib.sha256(plans.machine_id().encode()).hexdigest()[:12]
        return f"machine {machine} ({socket.gethostname()}), user {getpass.getuser()} ({os.geteuid()}), {self._home}"

    def check(self, order: HostsOrder) -> list[str]:
        """See `HostsProvider.check`."""
        problems = []
        if not sys.platform.startswith("linux"):
            problems.append("hosts.provider local runs on Linux only: it needs /proc and 127.0.0.0/8")
            return problems
        if CUSTODY_MARK in self._environ:
            problems.append(
                f"{CUSTODY_MARK} is set in the worker's environment: it runs inside a run and would be ended with it. "
                "Start the worker elsewhere"
            )
        try:
            options = plans.options_of(order)
        except HostsError as error:
            return [*problems, str(error)]
        try:
            check_parents(self._home / "x" if self._home.exists() else self._home)
            check_parents(Path("/tmp/x"))  # noqa: S108 (Ray's sockets need a short path; the directory is ours, 0700)
        except NotPrivate as error:
            problems.append(str(error))
        try:
            environment.check_device(environment.verify(), order.device)
        except (environment.EnvironmentBroken, NotPrivate) as error:
            problems.append(str(error))
        memory = plans.available_memory_bytes()
        wanted = order.count * (options.object_store_mb + 1000) * 10**6
        if memory < wanted:
            problems.append(
                f"{order.count} local hosts want about {wanted / 1e9:.1f} GB of memory, {memory / 1e9:.1f} are free; "
                "free some, or ask for fewer hosts"
            )
        return problems

    def offer(self, order: HostsOrder) -> Offer:
        """See `HostsProvider.offer`. This machine is there anyway."""
        return Offer(f"{order.count} local hosts, {order.device}")

    def claims(self, order: HostsOrder) -> list[Claim]:
        """The cluster (addresses, directories) and the service (the processes)."""
        key = order.identity.run_key
        names: list[tuple[ClaimKind, str]] = [("cluster", key), ("service", f"{key}-hosts")]
        return [
            Claim(
                kind=kind,
                name=name,
                provider=self.name,
                context=self.context(order),
                run_id=order.identity.run_id,
                holder=f"worker {os.getpid()} on {socket.gethostname()}",
                send_window_s=SEND_WINDOW_S,
                longest_request_s=LONGEST_REQUEST_S,
            )
            for kind, name in names
        ]

    def launch(self, order: HostsOrder, may_send: MaySend, progress: Progress) -> None:
        """See `HostsProvider.launch`. A live service is adopted, a missing one started, a dead one is a failure."""
        if CUSTODY_MARK in self._environ:
            raise HostsFailed(f"{CUSTODY_MARK} is set in the worker's environment; start the worker outside of any run")
        directory = self._directory(order)
        try:
            self._make_directory(order)
            with locked(directory / "lock", LOCK_WAIT_S):
                if (directory / "released").exists():
                    raise HostsFailed(f"{order.identity.run_key} was released on this machine; start a new run")
                plan = plans.make_plan(directory, order)
                for index in range(order.count):
                    progress(f"host {index} of {order.count}")
                    self._adopt_or_start(order, plan, index, may_send)
        except NotPrivate as error:
            raise HostsFailed(str(error)) from error
        deadline = time.monotonic() + BIRTH_LIMIT_S
        for index in range(order.count):
            seen = time.monotonic()
            while self._state(order, index) is None:
                if self._coming(order, index):
                    seen = time.monotonic()
                elif time.monotonic() - seen > UNSEEN_LIMIT_S and self._state(order, index) is None:
                    raise HostsFailed(f"host {index} did not come to life: {self._log_tail(order, index)}")
                if time.monotonic() > deadline:
                    raise HostsFailed(f"host {index} did not come to life within {BIRTH_LIMIT_S:.0f} s")
                progress(f"host {index} is coming to life")
                time.sleep(0.1)

    def prove(self, order: HostsOrder, progress: Progress) -> Hosts:
        """See `HostsProvider.prove`."""
        progress("looking at the hosts")
        for index in range(order.count):
            state = self._state(order, index)
            if state is None:
                raise HostsNotReady(f"host {index} has not begun")
            self._insist_on_life(order, index, state)
            if state["state"] != "ready":
                raise HostsNotReady(f"host {index} is {state['state']} {state['detail']}".rstrip())
        with self.endpoint(order) as endpoint:
            found = proof.prove(
                order,
                provider=self.name,
                context=self.context(order),
                cluster=order.identity.run_key,
                endpoint=endpoint,
                read=self._read,
            )
        for facts in found.hosts:
            state = self._state(order, facts.index)
            if state is None or state["node_id"] != facts.node_id:
                raise HostsFailed(f"the receipt of host {facts.index} is not the one of the service that runs here")
        return found

    @contextlib.contextmanager
    def endpoint(self, order: HostsOrder) -> Iterator[Endpoint]:
        """The dashboard on the head's own loopback address, with the run's token."""
        plan = plans.read_plan(self._directory(order))
        if plan is None:
            raise HostsNotReady(
                f"there are no hosts of {order.identity.run_key} on this machine ({self.context(order)})"
            )
        token = run_token(self._secret, order.identity.run_key)
        yield Endpoint(url=f"http://{plan.addresses[0]}:{plan.ports[1]}", token=token)

    def release(self, claim: Claim, order: HostsOrder, progress: Progress) -> StepTaken:
        """See `HostsProvider.release`.

        `service`: SIGTERM to the hosting services, each of which ends what it started; SIGKILL to marked processes
        that are left. `cluster`: the same for any latecomer, then Ray's directories, orders and tokens are removed.
        """
        self._check_context(claim, order)
        began = time.monotonic()
        directory = self._directory(order)
        plan, problems = None, []
        try:
            # Also where nothing was launched yet: a launch that is still to come, or under way, finds the mark and
            # starts nothing more. It is not waited for long.
            self._make_directory(order)
            write_private_file(directory / "released", b"")
            with contextlib.suppress(HostsNotReady), locked(directory / "lock", LAUNCH_PATIENCE_S):
                pass
            plan = plans.read_plan(directory)
        except (NotPrivate, AbsenceUnknown, OSError) as error:
            # Processes are found and ended without it.
            problems.append(str(error))
        services = self._live_services(order)
        left, killed = self._census(order, plan).end_all(
            services, progress, patience_s=PATIENCE_S, limit_s=KILL_LIMIT_S
        )
        problems += [str(each) for each in left]
        removed = 0
        if claim.kind == "cluster" and not problems:
            removed, trouble = self._remove(directory, plan)
            problems += trouble
        detail = f"{len(services)} hosting services told to end, {killed} left-over processes killed"
        if claim.kind == "cluster":
            detail += f", {removed} directories and files removed"
        return StepTaken(
            claim=claim.id,
            action="end processes" if claim.kind == "service" else "end processes, remove directories",
            ok=not problems,
            detail=detail + (f"; trouble: {'; '.join(problems)}" if problems else ""),
            seconds=round(time.monotonic() - began, 3),
        )

    def remaining(self, claim: Claim, order: HostsOrder) -> list[str]:
        """See `HostsProvider.remaining`."""
        self._check_context(claim, order)
        plan = plans.read_plan(self._directory(order))
        found = [str(each) for each in self._census(order, plan).take()]
        if claim.kind == "cluster" and plan is not None:
            found += listeners(list(plan.addresses))
            found += [f"directory {each}" for each in plan.directories if os.path.lexists(each)]
            found += [f"file {each}" for each in _secrets(self._directory(order))]
        return found

    def inventory(self, limit: int) -> Inventory:
        """See `HostsProvider.inventory`. What is here is the directories of runs, and what runs is theirs."""
        try:
            directories = sorted((self._home / "hosts").iterdir())
        except FileNotFoundError:
            return Inventory()
        except OSError as error:
            raise AbsenceUnknown(f"{self._home / 'hosts'} cannot be read: {error}") from error
        processes = sights()
        marked: list[Mark] = []
        unmarked: list[str] = []
        unreadable: dict[str, None] = {}
        for directory in directories:
            try:
                check_private_directory(directory)
                if _is_over(directory, processes):
                    continue
                if mark := read_mark(directory):
                    marked.append(mark)
                else:
                    unmarked.append(str(directory))
            except (NotPrivate, AbsenceUnknown) as error:
                unreadable[str(error)] = None  # a process that hides is told once, not for each run it could be of
        return Inventory(
            marked=tuple(marked[:limit]),
            unmarked=tuple(unmarked[:limit]),
            unreadable=tuple(unreadable)[:limit],
            left_out=sum(max(0, len(each) - limit) for each in (marked, unmarked, unreadable)),
        )

    # -- the run's directory on this machine

    def _directory(self, order: HostsOrder) -> Path:
        return self._home / "hosts" / order.identity.run_key

    def _make_directory(self, order: HostsOrder) -> None:
        directory = self._directory(order)
        for each in (self._home, self._home / "hosts"):
            with contextlib.suppress(FileExistsError):
                each.mkdir(mode=0o700, parents=True)
        try:
            create_private_directory(directory)
        except NotPrivate:
            if not os.path.lexists(directory):
                raise
            check_private_directory(directory)  # an earlier launch made it, or it is what it must not be
        write_mark(directory, Mark(context=self.context(order), hosts=order))

    def _census(self, order: HostsOrder, plan: plans.Plan | None) -> Census:
        return _census_of(self._directory(order), plan)

    # -- services

    def _adopt_or_start(self, order: HostsOrder, plan: plans.Plan, index: int, may_send: MaySend) -> None:
        state = self._state(order, index)
        if state is not None:
            self._insist_on_life(order, index, state)
            return
        if self._coming(order, index):
            return
        directory = self._directory(order)
        token, path = directory / f"{index}.token", directory / f"{index}.order.json"
        write_private_file(token, run_token(self._secret, order.identity.run_key).encode())
        write_private_file(path, json.dumps(self._host_order(order, plan, index, token), indent=1).encode())
        log = os.open(directory / f"{index}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        may_send()
        try:
            subprocess.run(
                [*self._service, "--order", str(path), "--detach"],
                cwd=SOURCE,
                env=self._host_environment(order),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=LONGEST_REQUEST_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise HostsFailed(f"host {index} cannot be started: {error}: {self._log_tail(order, index)}") from error
        finally:
            os.close(log)

    def _host_order(self, order: HostsOrder, plan: plans.Plan, index: int, token: Path) -> dict[str, Any]:
        options = plans.options_of(order)
        return {
            "schema": 1,
            "run_key": order.identity.run_key,
            "index": index,
            "role": "head" if index == 0 else "worker",
            "device": order.device,
            "storage": order.identity.storage,
            "private_dir": str(self._directory(order) / str(index)),
            "temp_dir": plan.temp_dirs[index],
            "shared_memory_dir": plan.shared_memory_dirs[index],
            "token_file": str(token),
            "address": plan.addresses[index],
            "interface": "lo",
            "gpus": [],
            "environments": "",
            "not_after_s": order.not_after_s,
            "ray": {
                "head_address": plan.addresses[0],
                "gcs_port": plan.ports[0],
                "dashboard_host": plan.addresses[0],
                "dashboard_port": plan.ports[1],
                "client_port": plan.ports[2],
                "runtime_env_port": plan.ports[3],
                "agent_port": plan.ports[4 + index],
                "worker_ports": [0, 0],
                "num_cpus": options.cpus,
                "object_store_bytes": options.object_store_mb * 10**6,
            },
        }

    def _host_environment(self, order: HostsOrder) -> dict[str, str]:
        kept = {name: value for name, value in self._environ.items() if INHERITED.fullmatch(name)}
        return {**kept, CUSTODY_MARK: order.identity.run_key}

    def _state(self, order: HostsOrder, index: int) -> dict[str, Any] | None:
        path = self._directory(order) / str(index) / "service.json"
        try:
            state: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise HostsFailed(f"{path} cannot be read: {error}") from error
        return state

    def _insist_on_life(self, order: HostsOrder, index: int, state: Mapping[str, Any]) -> None:
        over = state["state"] in ("ended", "failed", "ending")
        if not over and is_alive(state["pid"], state["start_time"], state["boot_id"]):
            return
        # Read again: it may have ended, and said why, between the two looks.
        state = self._state(order, index) or state
        if state["state"] in ("ended", "failed", "ending"):
            how = "is ending" if state["state"] == "ending" else f"has {state['state']}"
            raise HostsFailed(f"host {index} {how} ({state['reason']}): {state['detail']}")
        # One that was ready has nothing to say of its end; one that was not may have said what was in its way.
        said = "" if state["state"] == "ready" else f". {self._log_tail(order, index)}"
        raise HostsFailed(
            f"host {index} is dead without a word, last {state['state']}: killed from outside, or the machine was "
            f"restarted{said}"
        )

    def _coming(self, order: HostsOrder, index: int) -> bool:
        """Whether a service for this host runs, also one that has not written its state yet."""
        path = str(self._directory(order) / f"{index}.order.json")
        return any(path in each.command for each in self._census(order, None).take())

    def _live_services(self, order: HostsOrder) -> list[Process]:
        found: dict[int, Process] = {}
        for index in range(order.count):
            with contextlib.suppress(HostsFailed):
                state = self._state(order, index)
                if state and is_alive(state["pid"], state["start_time"], state["boot_id"]):
                    process = look_up(state["pid"])
                    if process is not None and process.start_time == state["start_time"]:
                        found[process.pid] = process
        # One that was just born has no state yet.
        orders = [str(self._directory(order) / f"{index}.order.json") for index in range(order.count)]
        for each in self._census(order, None).take():
            if any(path in each.command for path in orders):
                found[each.process.pid] = each.process
        return list(found.values())

    def _log_tail(self, order: HostsOrder, index: int) -> str:
        text = read_tail(self._directory(order) / f"{index}.log", 600).decode(errors="replace").strip()
        return " / ".join(text.splitlines()[-4:]) or "its log is empty"

    # -- release

    def _check_context(self, claim: Claim, order: HostsOrder) -> None:
        if claim.provider != self.name or claim.context != self.context(order):
            raise WrongContext(
                f"{claim.id} was claimed at {claim.provider} on {claim.context}; this worker is {self.name} on "
                f"{self.context(order)}. Run a worker there, as that user and with that LANYARD_HOME, to release it"
            )

    def _remove(self, directory: Path, plan: plans.Plan | None) -> tuple[int, list[str]]:
        removed, trouble = 0, []
        for path in plan.directories if plan else []:
            try:
                if os.lstat(path).st_uid != os.geteuid():
                    trouble.append(f"{path} is another user's")
                    continue
                shutil.rmtree(path)
                removed += 1
            except FileNotFoundError:
                continue
            except OSError as error:
                trouble.append(f"{path}: {error}")
        for file in [*directory.iterdir(), *directory.glob("*/token")]:
            if _secret_file(file.name):
                file.unlink(missing_ok=True)
                removed += 1
        return removed, trouble


def _secret_file(name: str) -> bool:
    return name.endswith((".token", ".order.json")) or name == "token"


def _secrets(directory: Path) -> list[Path]:
    """Orders and tokens in a run's directory. Raises AbsenceUnknown."""
    try:
        return sorted(each for each in directory.iterdir() if _secret_file(each.name))
    except OSError as error:
        raise AbsenceUnknown(f"{directory} cannot be read: {error}") from error


def _is_over(directory: Path, processes: Sequence[Sight]) -> bool:
    """Whether the run that has this directory was released and nothing of it is left. Raises AbsenceUnknown."""
    if not os.path.lexists(directory / "released"):
        return False
    plan = plans.read_plan(directory)
    if _secrets(directory) or any(os.path.lexists(each) for each in (plan.directories if plan else [])):
        return False
    return not _census_of(directory, plan).own(processes)


def _census_of(directory: Path, plan: plans.Plan | None) -> Census:
    """How the processes of the run that has this directory are told."""
    outside = [str(each) for each in plan.directories] if plan else []
    return Census(directory.name, (str(directory), *outside), plan.since if plan else None)
