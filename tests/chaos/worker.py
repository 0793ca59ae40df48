"""The operator's worker, as `worker/wiring.py` puts it together, held at the point of the plan.

    python -m tests.chaos.worker FOLDER SLICE [VARIANT] [--spare]

FOLDER has the plan and the tunnel's `cut`. SLICE `light` gives it the light hosting service, shorter durations and a
check of SHA256SUMS in place of the inspector (which needs torch); `real` changes nothing but the holding. VARIANT:
`newer` (a later version: another trainer source, and a patched workflow), `typeless` (does not know GuardedTrain),
`changed` (an incompatible GuardedTrain), `deadlocked` (a GuardedTrain that blocks its task), `blocked` (all threads of
launches hang, and no slot of watchers is free beside those of one run). With `--spare` everything
is imported, and work begins with the first line on the standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import temporalio.worker._workflow as sdk_workflow
from temporalio import activity, workflow
from temporalio.worker import (
    ActivityInboundInterceptor,
    ActivityOutboundInterceptor,
    ExecuteActivityInput,
    ExecuteWorkflowInput,
    Interceptor,
    Worker,
    WorkflowInboundInterceptor,
    WorkflowInterceptorClassInput,
)

from activities.hosts import MaySend, Progress, proof
from activities.hosts.local import LocalHosts
from activities.hosts.plan import Plan as HostsPlan
from activities.jobs import Endpoint, Jobs, package
from activities.storage import Storage
from activities.verification import Application
from tests.chaos import tempo
from tests.chaos.light import host as light_host
from tests.chaos.light import storage as light_storage
from tests.chaos.plan import LOOK_S, Plan
from tests.chaos.tunnel import tunnel
from trainer import environment
from worker import wiring
from worker.__main__ import leave
from worker.settings import Settings, SettingsError
from workflows.evidence import Claim, HostsOrder, StepTaken
from workflows.guarded_train import GuardedTrain

LIGHT_SERVICE = (sys.executable, str(Path(light_host.__file__)))


class Holder:
    """Knows the plan, and counts what comes by."""

    def __init__(self, folder: Path) -> None:
        self.plan = Plan(folder)
        self.cut = folder / "cut"
        self._counts: dict[tuple[str, str], int] = {}

    def wanted(self, kind: str, of: str | None, call: str = "", done: bool = False) -> str | None:
        """The plan's name when this is its point: counted, and said to be reached."""
        armed = self.plan.armed()
        if armed is None:
            return None
        asked = armed["call"] or {}
        if armed["kind"] != kind or (of is not None and armed["of"] != of):
            return None
        if kind == "half":
            verb, _, ends_with = asked["name"].partition(" ")
            if call.partition(" ")[0] != verb or not call.endswith(ends_with) or asked["done"] != done:
                return None
        nth = int(asked["nth"]) if kind == "half" else int(armed["nth"])
        key = armed["name"], kind
        self._counts[key] = self._counts.get(key, 0) + 1
        name = str(armed["name"])
        return name if self._counts[key] == nth and self.plan.reach(name) else None

    async def pass_by(self, kind: str, of: str | None, call: str = "", done: bool = False) -> None:
        """Be held here if this is the point; the rest of the worker goes on."""
        name = self.wanted(kind, of, call, done)
        while name and not self.plan.may_go(name):  # noqa: ASYNC110 (what is waited for is a file)
            await asyncio.sleep(LOOK_S)

    def pass_by_blocking(self, kind: str, of: str | None, call: str = "", done: bool = False) -> None:
        """The same, in a thread of its own."""
        name = self.wanted(kind, of, call, done)
        if name:
            self.plan.hold(name)


class Watching(Interceptor):
    """Before and after each activity, and at its heartbeats."""

    def __init__(self, holder: Holder, variant: str) -> None:
        self._holder, self._variant = holder, variant

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Activity(next, self._holder)

    def workflow_interceptor_class(
        self, input: WorkflowInterceptorClassInput
    ) -> type[WorkflowInboundInterceptor] | None:
        return {"newer": Newer, "changed": Changed, "deadlocked": Deadlocked}.get(self._variant)


class _Activity(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, holder: Holder) -> None:
        super().__init__(next)
        self._holder = holder

    def init(self, outbound: ActivityOutboundInterceptor) -> None:
        super().init(_Heartbeats(outbound, self._holder))

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        name = activity.info().activity_type
        await self._holder.pass_by("before", name)
        result = await super().execute_activity(input)
        await self._holder.pass_by("after", name)
        return result


class _Heartbeats(ActivityOutboundInterceptor):
    def __init__(self, next: ActivityOutboundInterceptor, holder: Holder) -> None:
        super().__init__(next)
        self._holder = holder

    def heartbeat(self, *details: Any) -> None:
        # Held with the whole worker: a heartbeat is given away, not awaited.
        self._holder.pass_by_blocking("heartbeat", self.info().activity_type)
        super().heartbeat(*details)


class Newer(WorkflowInboundInterceptor):
    """A later version that does one thing more, behind a patch."""

    async def execute_workflow(self, input: ExecuteWorkflowInput) -> Any:
        workflow.patched("chaos-newer")
        return await super().execute_workflow(input)


class Changed(WorkflowInboundInterceptor):
    """A later version of GuardedTrain that forgot the patch: its histories do not replay."""

    async def execute_workflow(self, input: ExecuteWorkflowInput) -> Any:
        if workflow.info().workflow_type == "GuardedTrain":
            await workflow.sleep(0.001)
        return await super().execute_workflow(input)


class Deadlocked(WorkflowInboundInterceptor):
    """A bug that blocks every workflow task of GuardedTrain."""

    async def execute_workflow(self, input: ExecuteWorkflowInput) -> Any:
        if workflow.info().workflow_type == "GuardedTrain":
            with workflow.unsafe.sandbox_unrestricted():
                time.sleep(3)  # noqa: ASYNC251 (blocking is the bug)
        return await super().execute_workflow(input)


class WatchedHosts(LocalHosts):
    """The provider `local`, held at its effects and reached through the tunnel."""

    def __init__(self, holder: Holder, home: Path, secret: bytes, **parts: Any) -> None:
        def read(uri: str) -> bytes | None:
            holder.pass_by_blocking("half", None, f"read receipt {uri.split('/')[-2]}")
            return proof.read_object(uri)

        super().__init__(home, secret, read=read, **parts)
        self._holder = holder

    def _adopt_or_start(self, order: HostsOrder, plan: HostsPlan, index: int, may_send: MaySend) -> None:
        def send() -> None:
            may_send()
            # Permitted, and not sent yet.
            self._holder.pass_by_blocking("half", None, f"start host {index}")

        super()._adopt_or_start(order, plan, index, send)

    def release(self, claim: Claim, order: HostsOrder, progress: Progress) -> StepTaken:
        self._holder.pass_by_blocking("half", None, f"release {claim.kind}")
        return super().release(claim, order, progress)

    @contextlib.contextmanager
    def endpoint(self, order: HostsOrder) -> Iterator[Endpoint]:
        with super().endpoint(order) as found:
            parts = urlsplit(found.url)
            with tunnel((str(parts.hostname), int(parts.port or 0)), self._holder.cut) as port:
                yield Endpoint(url=f"http://127.0.0.1:{port}", token=found.token)


class LightApplication(Application):
    """Checks SHA256SUMS, and nothing else: the inspector needs torch and Arrow."""

    async def tool(self, module: str, *args: str, given: str = "") -> tuple[int, str, str]:
        if module != "trainer.inspect_results":
            return 2, "", f"{module} is not in the light slice"
        checks = await asyncio.to_thread(_checksums, args[0], args[args.index("--submission") + 1])
        told = {"ok": all(each["ok"] for each in checks), "checks": checks, "not_applicable": [], "figures": {}}
        return (0 if told["ok"] else 1), json.dumps(told), ""


def _checksums(root: str, submission: str) -> list[dict[str, Any]]:
    store, place = light_storage.filesystem(), f"{root.removeprefix('s3://')}/exports/{submission}"
    manifest = store.get(f"{place}/SHA256SUMS")
    if manifest is None:
        return [{"name": "checksums", "ok": False, "detail": f"there is no {place}/SHA256SUMS"}]
    checks = []
    for line in manifest.decode().splitlines():
        digest, _, name = line.partition("  ")
        data = store.get(f"{place}/{name}")
        ok = data is not None and hashlib.sha256(data).hexdigest() == digest
        checks.append({"name": f"checksum of {name}", "ok": ok, "detail": "as listed" if ok else "differs"})
    return checks


def hold_at_calls(holder: Holder, patches: contextlib.ExitStack) -> None:
    """Have the operator's clients of the outside pass by the holder."""

    def patch(owner: Any, method: str, named: Callable[..., str]) -> None:
        before = getattr(owner, method)

        @functools.wraps(before)
        async def watched(self: Any, *args: Any, **told: Any) -> Any:
            if not activity.in_activity():
                return await before(self, *args, **told)
            of, call = activity.info().activity_type, named(*args)
            await holder.pass_by("half", of, call)
            result = await before(self, *args, **told)
            await holder.pass_by("half", of, call, done=True)
            return result

        patches.enter_context(mock.patch.object(owner, method, watched))

    for method in ("get", "put", "delete"):
        patch(Storage, method, lambda uri, *_, method=method: f"storage.{method} {uri.rsplit('/', 1)[-1]}")
    patch(Jobs, "_ask", lambda method, path, *_: _request(method, path))
    patch(Application, "tool", lambda module, *_: f"tool {module}")
    patch(LightApplication, "tool", lambda module, *_: f"tool {module}")


def _request(method: str, path: str) -> str:
    parts = path.strip("/").split("/")
    if parts[1] == "jobs":
        return f"{method} {'jobs' if len(parts) == 2 else 'stop' if parts[-1] == 'stop' else 'job'}"
    return f"{method} {parts[1] if parts[1] != 'v0' else parts[2]}"


def hold_between_tasks(holder: Holder, patches: contextlib.ExitStack) -> None:
    """Pass by the holder after each workflow task whose answer the server has."""
    before = sdk_workflow._WorkflowWorker._handle_activation
    types: dict[str, str] = {}

    async def handled(self: Any, act: Any) -> None:
        for job in act.jobs:
            if job.HasField("initialize_workflow"):
                types[act.run_id] = job.initialize_workflow.workflow_type
        real = any(not (job.HasField("remove_from_cache") or job.HasField("query_workflow")) for job in act.jobs)
        await before(self, act)
        if real and act.run_id in types:
            await holder.pass_by("gap", types[act.run_id])

    patches.enter_context(mock.patch.object(sdk_workflow._WorkflowWorker, "_handle_activation", handled))


def blocked_launches(count: int, name: str) -> ThreadPoolExecutor:
    """Threads as the wiring wants them; those of launches are busy with something that never ends."""
    made = ThreadPoolExecutor(count, name)
    if name == "launch":
        for _ in range(count):
            made.submit(time.sleep, 3600)
    return made


async def main(folder: Path, which: str, variant: str, spare: bool) -> None:
    """Work until told to stop."""
    holder = Holder(folder)
    light = which == "light"
    with contextlib.ExitStack() as patches:
        if light:
            tempo.live_fast()
            patches.enter_context(mock.patch.object(environment, "verify", return_value=light_host.RECORD))
            patches.enter_context(mock.patch.object(wiring, "Application", LightApplication))
        service: dict[str, Any] = {"service": LIGHT_SERVICE} if light else {}
        hosts = functools.partial(WatchedHosts, holder, **service)
        patches.enter_context(mock.patch.object(wiring, "LocalHosts", hosts))
        hold_at_calls(holder, patches)
        hold_between_tasks(holder, patches)
        if variant == "newer":
            trees = {"VERSION": Path(__file__).parent / "light"}
            patches.enter_context(mock.patch.object(wiring, "package", lambda given: package({**given, **trees})))
        if variant == "blocked":
            patches.enter_context(mock.patch.object(wiring, "ThreadPoolExecutor", blocked_launches))
            patches.enter_context(mock.patch.object(wiring, "WATCH_SLOTS", 2))
        more: dict[str, Any] = {"interceptors": [Watching(holder, variant)]}
        if light:
            more["sticky_queue_schedule_to_start_timeout"] = tempo.STICKY

        def make(client: Any, **given: Any) -> Any:
            if variant == "typeless" and given.get("workflows"):
                given["workflows"] = [each for each in given["workflows"] if each is not GuardedTrain]
            return Worker(client, **given, **more)

        patches.enter_context(mock.patch.object(wiring, "Worker", make))
        if spare:
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        await wiring.run_worker(Settings.load())


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--spare"]
    try:
        asyncio.run(main(Path(words[0]), words[1], words[2] if len(words) > 2 else "", "--spare" in sys.argv))
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        leave(2)
    leave(0)
