"""The provider `skypilot`: rents hosts through SkyPilot, on Slurm.

What a run owns: one SkyPilot cluster and one service task in it, both by names that follow from the run's key. SkyPilot
does the work, and is believed in nothing that matters: whether a host is up the host itself proves, and whether it is
gone the infrastructure is asked. So nothing here depends on a request's id, an answer, or SkyPilot's table.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import ValidationError

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
from activities.hosts.lock import locked
from activities.hosts.plan import machine_id
from activities.hosts.skypilot import task
from activities.hosts.skypilot.bridge import VERSION, BridgeError, NoSkyPilot, SkyPilot
from activities.hosts.skypilot.infrastructure import (
    LOOKS_LIKE_OURS,
    Found,
    Run,
    Slurm,
    known_slurms,
    login_node,
    slurm_of,
)
from activities.hosts.skypilot.tunnel import Entry, tunnel
from activities.jobs import Endpoint
from activities.token import run_token
from trainer.private import NotPrivate
from workflows.evidence import Claim, ClaimKind, Hosts, HostsOrder, Inventory, Mark, StepTaken
from workflows.names import custody_id

ANSWER_S: Final = 120.0
"""One question to SkyPilot, the start of its local API server (17 to 43 s) included."""
FOLLOW_S: Final = 6 * 3600.0
"""The longest launch that is waited for: `limits.provision` is at most this."""
ASKED_S: Final = 30.0
"""From the word in storage to the end of the hosts: they look every 2 s, and Ray gets 6 s to end its own."""
CANCEL_S: Final = 60.0
"""From SkyPilot's cancel of the service task to its end (measured: 7 to 13 s)."""
CANCELLED_S: Final = 10.0
"""From a cancel to the end of the step."""
DOWN_S: Final = 150.0
"""What `down` may take (measured: 10 to 45 s) before the infrastructure is told directly."""
GONE_S: Final = 60.0
"""From `scancel` to the end of the job: Slurm's own KillWait is 30 s."""
SEND_WINDOW_S: Final = 240.0
"""From the claim to the launch request: the server may have to start, and SkyPilot is looked at first."""
LONGEST_REQUEST_S: Final = 120.0
"""From the request to Slurm's knowing the job. A launch in flight is cancelled before anything is proved."""
LOCK_WAIT_S: Final = 120.0
LOOK_AT_SERVICE_S: Final = 10.0
"""Between two looks at the service task while the hosts' receipts are awaited: each takes a second or two."""
LOOK_S: Final = 1.0

NEVER: Final = re.compile(
    r"pending: (PartitionNodeLimit|PartitionTimeLimit|BadConstraints|AccountNotAllowed|QOSNotAllowed|InvalidAccount"
    r"|InvalidQOS)\b"
)
"""Slurm's reasons that no waiting changes."""

WriteObject = Callable[[str, bytes], None]
"""Writes an `s3://` object. Raises HostsNotReady."""


class SkyPilotHosts:
    """The provider `skypilot`.

    ``home`` is LANYARD_HOME; ``secret`` the deployment secret; ``sky`` which SkyPilot; ``environments`` where on the
    hosts application environments lie ("": the default); ``read`` and ``write`` reach storage; ``slurm`` runs a
    command on the login node of a Slurm cluster.
    """

    name = "skypilot"

    def __init__(
        self,
        home: Path,
        secret: bytes,
        sky: SkyPilot,
        *,
        environments: str = "",
        read: proof.ReadObject = proof.read_object,
        write: WriteObject = proof.write_object,
        slurm: Callable[[str], Run] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._home = Path(os.path.realpath(home)) / "skypilot-runs"
        self._secret = secret
        self._sky = sky
        self._environments = environments
        self._read, self._write = read, write
        self._slurm = slurm or (lambda cluster: login_node(cluster, sky.home, sky.environment()))
        self._environ = os.environ if environ is None else environ
        self._looked: dict[str, float] = {}
        self._lock = threading.Lock()

    def context(self, order: HostsOrder) -> str:
        """The infrastructure, and the SkyPilot through which it is reached."""
        infra = task.options_of(order).infra
        if self._sky.endpoint:
            parts = urlsplit(self._sky.endpoint)
            return f"{infra} through SkyPilot at {parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        machine = hashlib.sha256(machine_id().encode()).hexdigest()[:12]
        return (
            f"{infra} through SkyPilot of machine {machine} ({socket.gethostname()}), user {getpass.getuser()} "
            f"({os.geteuid()}), {self._sky.home}"
        )

    # -- before anything is paid for

    def check(self, order: HostsOrder) -> list[str]:
        """See `HostsProvider.check`."""
        options = task.options_of(order)
        cluster = slurm_of(options.infra)
        if cluster is None:
            return [
                f"hosts.infra: {options.infra} is not supported by this version, because it could not prove there that "
                "nothing is left; use slurm/<cluster>"
            ]
        problems = self._check_keys()
        if cluster not in known_slurms(self._sky.home):
            problems.append(
                f"hosts.infra: {cluster} is not in {self._sky.home / '.slurm' / 'config'}, where SkyPilot and the "
                "proof of absence look for it; add a Host entry for its login node"
            )
            return problems
        try:
            problems += self._check_infra(order, Slurm(cluster, self._slurm(cluster)))
            problems += self._check_skypilot(order, options)
        except AbsenceUnknown as error:
            problems.append(f"hosts.infra: {error}; mend that first: without it nothing could be proved released")
        except NoSkyPilot as error:
            problems.append(f"SkyPilot does not answer: {error}. Look at it with `sky api info` in its own environment")
        except BridgeError as error:
            problems.append(f"SkyPilot refuses {options.infra}: {_reason(error)}")
        return problems

    def _check_keys(self) -> list[str]:
        keys = task.storage_keys(self._environ)
        missing = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if name not in keys]
        if missing:
            return [
                f"{' and '.join(missing)} must be in the worker's environment: the hosts get storage's keys from there"
            ]
        host = urlsplit(keys.get("AWS_ENDPOINT_URL", "")).hostname
        if host and (host == "localhost" or host.startswith("127.") or host == "::1"):
            return [
                f"AWS_ENDPOINT_URL is on this machine's loopback ({host}), which no rented host can reach; use an "
                "address that both the worker and the hosts reach"
            ]
        return []

    def _check_infra(self, order: HostsOrder, slurm: Slurm) -> list[str]:
        taken = slurm.of(order)
        return [
            f"{each} has this run's name and is not marked as its own; end it, or start the run anew"
            for each in (*taken.unmarked, *taken.foreign)
            if not each.over
        ]

    def _check_skypilot(self, order: HostsOrder, options: task.SkyPilotOptions) -> list[str]:
        versions = self._sky.call("server", limit_s=ANSWER_S)
        wrong = {f"{part} {found}" for part, found in versions.items() if found != VERSION}
        if wrong:
            return [f"SkyPilot must be {VERSION}, and its {', '.join(sorted(wrong))}; install that version"]
        cloud = options.infra.partition("/")[0]
        enabled = self._sky.call("enabled", limit_s=ANSWER_S, cloud=cloud)
        if not enabled["enabled"]:
            return [
                f"hosts.infra: SkyPilot has {cloud} not enabled ({', '.join(enabled['clouds']) or 'nothing is'}); see "
                f"`sky check {cloud}`"
            ]
        # The files are not there yet, and no directory of this machine is read for a plan.
        wanted = task.task_config(order, task.SOURCE)
        del wanted["file_mounts"]
        found = self._sky.call("plan", limit_s=ANSWER_S, task=wanted)
        if options.accelerators:
            name = options.accelerators.partition(":")[0]
            if name not in found["accelerators"]:
                return [
                    f"hosts.accelerators: {name} is spelled {', '.join(found['accelerators']) or 'otherwise'} by "
                    "SkyPilot; write that"
                ]
        return []

    def offer(self, order: HostsOrder) -> Offer:
        """See `HostsProvider.offer`. Slurm has no price."""
        options = task.options_of(order)
        of_what = options.accelerators or order.device
        return Offer(f"{order.count} hosts from SkyPilot on {options.infra}, {of_what}")

    def claims(self, order: HostsOrder) -> list[Claim]:
        """The cluster, and the service task in it. One request creates both."""
        key = order.identity.run_key
        names: list[tuple[ClaimKind, str]] = [("cluster", task.cluster_name(key)), ("service", task.service_name(key))]
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
                price_per_hour=order.price_per_hour if kind == "cluster" else 0.0,
            )
            for kind, name in names
        ]

    # -- launch

    def launch(self, order: HostsOrder, may_send: MaySend, progress: Progress) -> None:
        """See `HostsProvider.launch`. The launch goes on at the API server whatever becomes of its client, so it is
        looked for first, by name, and followed."""
        try:
            self._write(
                task.mark_uri(order.identity.storage),
                Mark(context=self.context(order), hosts=order).model_dump_json(indent=1).encode(),
            )
            lock = self._files(order).with_suffix(".lock")
            lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SkyPilot would queue a second service task.
            with locked(lock, LOCK_WAIT_S):
                request = self._adopt_or_send(order, may_send, progress)
            if request:
                self._follow(order, request, progress)
            self._insist_on_launched(order)
        except NoSkyPilot as error:
            raise HostsNotReady(f"SkyPilot does not answer: {error}") from error
        except (BridgeError, NotPrivate) as error:
            raise HostsFailed(_reason(error)) from error

    def _adopt_or_send(self, order: HostsOrder, may_send: MaySend, progress: Progress) -> str:
        """The request to follow; "" where the service is there already."""
        cluster = task.cluster_name(order.identity.run_key)
        progress(f"looking for {cluster}")
        self._refuse_strangers(self._look_at_infra(order))
        found = self._sky.call("look", limit_s=ANSWER_S, cluster=cluster, ssh=False)
        if found["version"] != VERSION:
            raise HostsFailed(f"SkyPilot is {found['version']}, this needs {VERSION}")
        if found["launches"]:
            progress("a launch is under way")
            return str(found["launches"][0])
        if self._service(order, found["queue"]):
            return ""
        # No host of this run started without its service: what SkyPilot has of the cluster it completes by its name.
        task.write_files(
            self._files(order),
            order,
            token=run_token(self._secret, order.identity.run_key),
            keys=task.storage_keys(self._environ),
            environments=self._environments,
        )
        may_send()
        sent = self._sky.call(
            "launch",
            limit_s=ANSWER_S,
            cluster=cluster,
            task=task.task_config(order, self._files(order)),
            autodown_minutes=task.AUTODOWN_MINUTES,
        )
        return str(sent["request"])

    def _follow(self, order: HostsOrder, request: str, progress: Progress) -> None:
        cluster = task.cluster_name(order.identity.run_key)

        def note(word: str) -> None:
            progress(word)
            if found := NEVER.search(word):
                # SkyPilot waits for a day.
                raise HostsFailed(f"Slurm will never start {cluster} ({found[1]}): ask for fewer or smaller hosts")

        ended = self._sky.call("follow", limit_s=FOLLOW_S, note=note, cluster=cluster, request=request)
        if ended["status"] == "UNKNOWN":
            raise HostsNotReady(f"SkyPilot lost the launch of {cluster}: {ended['message']}")
        if ended["status"] != "SUCCEEDED":
            said = re.sub(r"\s+", " ", ended["message"])[-800:]
            raise HostsFailed(f"SkyPilot could not launch {cluster} ({ended['status'].lower()}): {said}")

    def _insist_on_launched(self, order: HostsOrder) -> None:
        """The launch's own success is not believed in what matters when everything else fails: mark and autodown."""
        cluster = task.cluster_name(order.identity.run_key)
        found = self._sky.call("look", limit_s=ANSWER_S, cluster=cluster, ssh=True)
        row = found["row"]
        if row is None or not self._service(order, found["queue"]):
            raise HostsNotReady(f"SkyPilot's launch ended, but {cluster} does not run its service task")
        if row["autodown_minutes"] != task.AUTODOWN_MINUTES:
            raise HostsFailed(f"SkyPilot did not set autodown for {cluster}, the last backstop against a leak")
        infra = self._look_at_infra(order)
        self._refuse_strangers(infra)
        if len(infra.live) != 1:
            raise HostsFailed(f"Slurm has {len(infra.live)} jobs with the mark of {cluster}, instead of one")

    def _refuse_strangers(self, found: Found) -> None:
        for each in (*found.unmarked, *found.foreign):
            if not each.over:
                raise HostsFailed(
                    f"{each} has this run's name and not its mark (but {each.comment or 'none'}); it is not touched"
                )

    def _service(self, order: HostsOrder, queue: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the service task is under way. Raises HostsFailed where it is over."""
        name = task.service_name(order.identity.run_key)
        named = [each for each in queue if each["name"] == name]
        if not named or not all(each["over"] for each in named):
            return bool(named)
        last = named[0]
        raise HostsFailed(
            f"the service task {last['id']} has ended ({last['status']}): {self._log_tail(order, last['id'])}"
        )

    def _log_tail(self, order: HostsOrder, job: int) -> str:
        cluster = task.cluster_name(order.identity.run_key)
        try:
            text = self._sky.call("log", limit_s=ANSWER_S, cluster=cluster, job=job, lines=20)["text"]
        except BridgeError as error:
            return f"its log cannot be read ({_reason(error)})"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " / ".join(lines[-6:])[-900:] or "its log is empty"

    # -- up

    def prove(self, order: HostsOrder, progress: Progress) -> Hosts:
        """See `HostsProvider.prove`. UP in SkyPilot's table proves nothing; each host's own receipt does."""
        try:
            proof.receipts(order, self._read)
        except HostsNotReady:
            if self._may_look(order):
                self._insist_on_life(order)
            raise
        progress("asking Ray for its nodes")
        try:
            with self.endpoint(order) as endpoint:
                return proof.prove(
                    order,
                    provider=self.name,
                    context=self.context(order),
                    cluster=task.cluster_name(order.identity.run_key),
                    endpoint=endpoint,
                    read=self._read,
                )
        except HostsNotReady:
            self._insist_on_life(order)
            raise

    def _may_look(self, order: HostsOrder) -> bool:
        """Whether it is time for another look at the service: not at the first time either, it has just begun."""
        key, now = order.identity.run_key, time.monotonic()
        with self._lock:
            last = self._looked.setdefault(key, now)
            if now - last < LOOK_AT_SERVICE_S:
                return False
            self._looked = {name: at for name, at in self._looked.items() if now - at < 600.0} | {key: now}
            return True

    def _insist_on_life(self, order: HostsOrder) -> None:
        """Raises HostsFailed where waiting is in vain: the allocation or the service task is over."""
        with contextlib.suppress(AbsenceUnknown):
            slurm = self._slurm_of(order)
            infra = slurm.of(order)
            if infra.ours and not infra.live:
                raise HostsFailed(f"{infra.ours[-1]} ({infra.ours[-1].why}): Slurm has ended the run's hosts")
            if not infra.ours:
                raise HostsFailed(f"slurm/{slurm.cluster} no longer has the run's hosts")
            if any(slurm.tasks(each) for each in infra.live):
                return
        # No task runs: it has not begun, or it has ended and SkyPilot knows how.
        with contextlib.suppress(BridgeError):
            found = self._sky.call(
                "look", limit_s=ANSWER_S, cluster=task.cluster_name(order.identity.run_key), ssh=False
            )
            if found["queue"]:
                self._service(order, found["queue"])

    @contextlib.contextmanager
    def endpoint(self, order: HostsOrder) -> Iterator[Endpoint]:
        """The dashboard on the head's own loopback, through a tunnel that lasts as long as the context."""
        key = order.identity.run_key
        with tunnel(self._entry(order), task.first_port(key) + 1, revive=self._revive) as port:
            yield Endpoint(url=f"http://127.0.0.1:{port}", token=run_token(self._secret, key))

    def _revive(self) -> None:
        """The way leads through SkyPilot's API server. A local one that was killed is started by whoever asks it."""
        with contextlib.suppress(BridgeError):
            self._sky.call("server", limit_s=ANSWER_S)

    def _entry(self, order: HostsOrder) -> Entry:
        cluster = task.cluster_name(order.identity.run_key)
        generated = self._sky.home / ".sky" / "generated"
        config, key = generated / "ssh" / cluster, generated / "ssh-keys" / f"{cluster}.key"
        if not (config.exists() and key.exists()):
            # Another worker launched it: SkyPilot writes its entry here too.
            try:
                written = self._sky.call("ssh", limit_s=ANSWER_S, cluster=cluster)
            except BridgeError as error:
                raise HostsNotReady(f"SkyPilot gives no way to {cluster}: {_reason(error)}") from error
            if not (written["config"] and written["key"]):
                raise HostsNotReady(f"SkyPilot has no way to {cluster}: it does not call it up")
        known = self._known_hosts(order)
        known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Entry(cluster, config, key, known, self._sky.environment())

    # -- release

    def release(self, claim: Claim, order: HostsOrder, progress: Progress) -> StepTaken:
        """See `HostsProvider.release`.

        `service`: the hosts end themselves, else SkyPilot cancels exactly that task, else Slurm ends its step; a
        cluster that is taken down under a running service leaves its processes for a while. `cluster`: launches in
        flight are cancelled, SkyPilot takes the cluster down, and what Slurm still shows of this run is ended there.
        """
        self._check_context(claim, order)
        began = time.monotonic()
        if claim.kind == "service":
            action, (ok, detail) = "end the service task", self._end_service(order, progress)
        else:
            action, (ok, detail) = "take the cluster down", self._take_down(order, progress)
        return StepTaken(
            claim=claim.id, action=action, ok=ok, detail=detail, seconds=round(time.monotonic() - began, 3)
        )

    def _end_service(self, order: HostsOrder, progress: Progress) -> tuple[bool, str]:
        """A cancel on Slurm is SIGKILL, and leaves what is in memory and on disk to a site's epilog. So the hosts are
        asked first, by a word in storage, where they look anyway."""
        if not self._tasks(order):
            return True, "no task of this run runs"
        progress("asking the hosts to end")
        said: list[str] = []
        try:
            self._write(task.end_uri(order.identity.storage), b"{}")
        except HostsNotReady as error:
            said.append(str(error))
        else:
            if not self._tasks_after(order, ASKED_S):
                return True, "the hosts ended themselves"
            said.append(f"the hosts did not end themselves within {ASKED_S:.0f} s")
        said.append(self._cancel_service(order))
        if steps := self._tasks_after(order, CANCELLED_S):
            slurm = self._slurm_of(order)
            for step in steps:
                slurm.cancel_task(step)
            said.append(f"Slurm told to end step {', '.join(steps)}")
        left = self._tasks_after(order, CANCELLED_S)
        said += [f"step {each} withstands" for each in left]
        return not left, "; ".join(said)

    def _cancel_service(self, order: HostsOrder) -> str:
        key = order.identity.run_key
        try:
            told = self._sky.call(
                "cancel_service",
                limit_s=ANSWER_S + CANCEL_S,
                cluster=task.cluster_name(key),
                service=task.service_name(key),
                seconds=CANCEL_S,
            )
        except BridgeError as error:
            return f"SkyPilot could not cancel it ({_reason(error)[:300]})"
        if not told["known"]:
            return "SkyPilot does not know the cluster"
        return ", ".join(f"task {each['id']} {each['status']}" for each in told["jobs"]) or "SkyPilot has no such task"

    def _tasks(self, order: HostsOrder) -> list[str]:
        slurm = self._slurm_of(order)
        return [step for each in slurm.of(order).live for step in slurm.tasks(each)]

    def _tasks_after(self, order: HostsOrder, seconds: float) -> list[str]:
        """The steps that are left when they all are gone, or the time is."""
        deadline = time.monotonic() + seconds
        while (left := self._tasks(order)) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return left

    def _take_down(self, order: HostsOrder, progress: Progress) -> tuple[bool, str]:
        cluster = task.cluster_name(order.identity.run_key)
        said: list[str] = []
        infra = self._look_at_infra(order)
        strangers = [each for each in (*infra.unmarked, *infra.foreign) if not each.over]
        try:
            cancelled = self._sky.call("cancel_launches", limit_s=ANSWER_S, cluster=cluster)["cancelled"]
            if cancelled:
                said.append(f"{len(cancelled)} launches cancelled")
            if strangers:
                # SkyPilot would end it too: it goes by the name alone.
                said.append(f"SkyPilot was not asked: {strangers[0]} is not this run's")
            else:
                progress(f"taking {cluster} down")
                told = self._sky.call("down", limit_s=ANSWER_S + DOWN_S, cluster=cluster, seconds=DOWN_S)
                said.append(f"SkyPilot's down: {told['status'].lower() or 'not known to it'} {told['message']}".strip())
        except BridgeError as error:
            said.append(f"SkyPilot did not do it ({_reason(error)[:300]})")
        ended = self._end_at_slurm(order)
        said += ended
        left = self._look_at_infra(order).live
        said += [f"{each} withstands" for each in left]
        if not left:
            said += self._forget(order)
        return not left, "; ".join(said)

    def _end_at_slurm(self, order: HostsOrder) -> list[str]:
        """What SkyPilot left is ended by its exact id."""
        slurm, said, asked = self._slurm_of(order), [], set()
        deadline = time.monotonic() + GONE_S
        while (live := slurm.of(order).live) and time.monotonic() < deadline:
            for each in live:
                if each.state != "COMPLETING" and each.id not in asked:
                    slurm.cancel(each)
                    asked.add(each.id)
                    said.append(f"Slurm told to end job {each.id}")
            time.sleep(LOOK_S)
        return said

    def _forget(self, order: HostsOrder) -> list[str]:
        """The run's private files on this machine."""
        files = self._files(order)
        try:
            for path in (files.with_suffix(".lock"), self._known_hosts(order)):
                path.unlink(missing_ok=True)
            if files.exists():
                shutil.rmtree(files)
        except OSError as error:
            return [f"{files} cannot be removed: {error}"]
        return []

    def remaining(self, claim: Claim, order: HostsOrder) -> list[str]:
        """See `HostsProvider.remaining`: what Slurm says, and nobody else."""
        self._check_context(claim, order)
        found = self._look_at_infra(order)
        if unmarked := [each for each in found.unmarked if not each.over]:
            raise AbsenceUnknown(
                f"{unmarked[0]} has this run's name and no mark: whose it is cannot be told. Look at it, and end it by "
                "hand if it is nobody's"
            )
        left = [str(each) for each in found.live]
        if claim.kind == "cluster" and self._files(order).exists():
            left.append(f"directory {self._files(order)}")
        return left

    def inventory(self, limit: int) -> Inventory:
        """See `HostsProvider.inventory`: every job with a mark of ours in every Slurm cluster that SkyPilot knows here.
        SkyPilot itself is not asked."""
        marked: dict[str, Mark] = {}
        unmarked: list[str] = []
        unreadable: list[str] = []
        for cluster in known_slurms(self._sky.home):
            try:
                jobs = [each for each in Slurm(cluster, self._slurm(cluster)).jobs() if not each.over]
            except AbsenceUnknown as error:
                unreadable.append(f"slurm/{cluster}: {error}")
                continue
            for job in jobs:
                found = task.MARK.fullmatch(job.comment)
                if found is None:
                    if LOOKS_LIKE_OURS.fullmatch(job.name):
                        unmarked.append(f"slurm/{cluster}: {job}")
                    continue
                try:
                    mark = self._read_mark(found[1], found[2], found[3], cluster, job.name)
                    marked[mark.hosts.identity.run_key] = mark
                except HostsError as error:
                    unreadable.append(f"slurm/{cluster}: {job}: {error}")
        every = list(marked.values())
        return Inventory(
            marked=tuple(every[:limit]),
            unmarked=tuple(unmarked[:limit]),
            unreadable=tuple(unreadable[:limit]),
            left_out=sum(max(0, len(each) - limit) for each in (every, unmarked, unreadable)),
        )

    def _read_mark(self, deployment: str, run_key: str, storage: str, cluster: str, name: str) -> Mark:
        """The whole mark, from storage. Raises HostsError for one that is not what the job's own mark says."""
        uri = task.mark_uri(storage)
        if (raw := self._read(uri)) is None:
            raise AbsenceUnknown(f"its mark {uri} is not there")
        try:
            mark = Mark.model_validate_json(raw)
        except ValidationError as error:
            raise AbsenceUnknown(f"its mark {uri} is damaged: {error.errors()[0]['msg']}") from error
        identity = mark.hosts.identity
        said = (identity.deployment, identity.run_key, identity.storage, identity.custody_id)
        if said != (deployment, run_key, storage, custody_id(run_key)) or not name.startswith(
            f"{task.cluster_name(run_key)}-"
        ):
            raise AbsenceUnknown(f"its mark {uri} is of run {identity.run_key} and not of this job")
        if slurm_of(task.options_of(mark.hosts).infra) != cluster:
            raise AbsenceUnknown(f"its mark {uri} is of a run on {task.options_of(mark.hosts).infra}")
        return mark

    # -- small things

    def _files(self, order: HostsOrder) -> Path:
        return self._home / order.identity.run_key

    def _known_hosts(self, order: HostsOrder) -> Path:
        return self._home / "known_hosts" / task.cluster_name(order.identity.run_key)

    def _slurm_of(self, order: HostsOrder) -> Slurm:
        cluster = slurm_of(task.options_of(order).infra)
        if cluster is None:
            raise AbsenceUnknown(f"{task.options_of(order).infra} cannot be asked by this version")
        return Slurm(cluster, self._slurm(cluster))

    def _look_at_infra(self, order: HostsOrder) -> Found:
        return self._slurm_of(order).of(order)

    def _check_context(self, claim: Claim, order: HostsOrder) -> None:
        if claim.provider != self.name or claim.context != self.context(order):
            raise WrongContext(
                f"{claim.id} was claimed at {claim.provider} on {claim.context}; this worker is {self.name} on "
                f"{self.context(order)}. Run a worker with that SkyPilot to release it"
            )


def _reason(error: Exception) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    kind = error.kind if isinstance(error, BridgeError) else ""
    return f"{kind}: {text}"[:800] if kind and kind not in text else text[:800]
