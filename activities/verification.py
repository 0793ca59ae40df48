"""Running the application environment's own tools from the operator: the inspector, and the search for a commit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.heartbeat import beating
from trainer import environment
from trainer.private import NotPrivate
from trainer.processes import dies_with_parent, is_alive, this_process
from workflows import activity_names
from workflows.evidence import Artifacts, Check, NotApplicable, VerifyOrder

MAX_OUTPUT: Final = 4 * 1024 * 1024
SCRATCH: Final = "lanyard-tool-"


class Application:
    """The application environment on this machine: built once, verified at each use, run as a subprocess."""

    def __init__(self, checkout: Path) -> None:
        self._checkout = checkout

    async def tool(self, module: str, *args: str, given: str = "") -> tuple[int, str, str]:
        """Run `python -m module args` with `given` as its input: (exit code, stdout, stderr's end). Ends with the
        activity, and with this process."""
        try:
            await asyncio.to_thread(environment.verify)
        except (environment.EnvironmentBroken, NotPrivate) as error:
            raise ApplicationError(f"the application environment: {error}", type="NoEnvironment") from error
        python = environment.interpreter(environment.path())
        # What it downloads and caches goes with it, also when it is killed half-way.
        scratch = await asyncio.to_thread(self._scratch)
        try:
            process = await asyncio.create_subprocess_exec(
                *dies_with_parent(),
                str(python),
                "-m",
                module,
                *args,
                cwd=self._checkout,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": scratch},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_OUTPUT,
            )
            try:
                out, err = await process.communicate(given.encode())
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
        return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")[-2000:]

    def _scratch(self) -> str:
        """A fresh private directory. Those of workers that were killed are removed on the way: a name says whose it
        is."""
        me = this_process()
        root = Path(tempfile.gettempdir())
        for left in root.glob(f"{SCRATCH}*"):
            pid, _, start = left.name.removeprefix(SCRATCH).rpartition("-")[0].partition("-")
            if pid.isdigit() and start.isdigit() and not is_alive(int(pid), int(start)):
                # Another user's stays, and so does what is no directory.
                shutil.rmtree(left, ignore_errors=True)
        return tempfile.mkdtemp(prefix=f"{SCRATCH}{me.pid}-{me.start_time}-")


class Verification:
    def __init__(self, application: Application) -> None:
        self._application = application

    @activity.defn(name=activity_names.VERIFY)
    async def verify_artifacts(self, order: VerifyOrder) -> Artifacts:
        """Download again from storage alone and check everything; what does not hold is a finding, not an error."""
        asked = ["--patient", "--submission", order.submission_id, "--json", "-", "--expect", "-"]
        if order.distinct_hosts:
            asked.append("--require-distinct-hosts")
        if order.distinct_devices:
            asked.append("--require-distinct-devices")
        async with beating(note=f"inspecting {order.identity.storage}"):
            code, out, err = await self._application.tool(
                "trainer.inspect_results", order.identity.storage, *asked, given=json.dumps(order.expect)
            )
        told = _json_of(out)
        if told is None or code not in (0, 1):
            raise ApplicationError(f"the inspector gave no result (exit {code}): {err.strip() or out.strip()[-500:]}")
        return Artifacts(
            ok=bool(told["ok"]) and code == 0,
            submission_id=order.submission_id,
            checks=tuple(Check(name=c["name"], ok=c["ok"], detail=str(c["detail"])[:500]) for c in told["checks"]),
            not_applicable=tuple(
                NotApplicable(name=c["name"], why=str(c["why"])[:500]) for c in told["not_applicable"]
            ),
            figures=told.get("figures", {}),
        )


def _json_of(out: str) -> dict[str, Any] | None:
    """The JSON object in a tool's output: all of it, or its last line."""
    for text in (out, out.strip().splitlines()[-1] if out.strip() else ""):
        try:
            told = json.loads(text)
        except ValueError:
            continue
        if isinstance(told, dict):
            return told
    return None
