"""A worker with workflows of the real names and the answers that the demo reads, and nothing behind them.

Run as a process by the tests of the stack and of the demo: `python tests/worker/stand_in.py`. What its GuardedTrain
does is chosen by the first word of run.json's `name`: `succeed`, `reject`, `fail`, `wait` (until aborted), `slow` (the
same, and its release takes long).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import boto3
from temporalio import activity, workflow
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from worker.connect import connect
from worker.settings import Settings
from workflows.timeouts import RUN_QUEUE

KEY = "stand-in-0123456789"
STORAGE = f"s3://lanyard/runs/{KEY}"


@activity.defn(name="watch_training")
async def watch(steps: int) -> None:
    for step in range(1, steps + 1):
        activity.heartbeat({"phase": "train", "step": step, "steps": steps, "loss": 1.0 / step, "note": "training"})
        await asyncio.sleep(0.5)


@activity.defn(name="write_report")
def report() -> None:
    client = boto3.client("s3")
    for name in ("report.json", "report.html"):
        client.put_object(Bucket="lanyard", Key=f"runs/{KEY}/{name}", Body=name.encode())


@workflow.defn(name="Custody")
class Custody:
    def __init__(self) -> None:
        self._due: str | None = None

    @workflow.run
    async def run(self) -> dict[str, Any]:
        await workflow.wait_condition(lambda: self._due is not None)
        await workflow.sleep(timedelta(seconds=1))
        return {
            "cleanup": "clean",
            "reason": self._due,
            "claims": self.claims(),
            "steps": [],
            "remaining": [],
            "began": 1.0,
            "ended": 2.0,
        }

    @workflow.signal
    def release(self, reason: str) -> None:
        self._due = reason

    @workflow.query
    def claims(self) -> list[dict[str, Any]]:
        names = {"cluster": KEY, "service": f"{KEY}-hosting", "job": f"{KEY}-train"}
        return [{"kind": kind, "name": name, "provider": "local"} for kind, name in names.items()]

    @workflow.query
    def state(self) -> dict[str, Any]:
        return {"state": "releasing" if self._due else "held"}


@workflow.defn(name="GuardedTrain")
class GuardedTrain:
    def __init__(self) -> None:
        self._aborted: str | None = None
        self._phase = "provision"
        self._events: list[dict[str, Any]] = []
        self._started = 0.0
        self._custody: str | None = None

    @workflow.run
    async def run(self, order: dict[str, Any]) -> dict[str, Any]:
        self._started = workflow.time()
        kind = order["name"].split("-")[0]
        if kind == "reject":
            told = {"outcome": "rejected", "cleanup": "clean", "message": "hosts.count: must be 2 or more"}
            raise ApplicationError("rejected: hosts.count: must be 2 or more", told, type="rejected")
        custody = await workflow.start_child_workflow(
            "Custody",
            id=f"custody-{KEY}-{workflow.info().run_id}",
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
        )
        self._custody = custody.id
        self._enter("train")
        if kind in ("wait", "slow"):
            await workflow.wait_condition(lambda: self._aborted is not None)
        else:
            watching = workflow.start_activity(
                "watch_training",
                6,
                start_to_close_timeout=timedelta(minutes=1),
                heartbeat_timeout=timedelta(seconds=2),
            )
            await workflow.sleep(timedelta(seconds=1.5))
            self._enter("recover")  # as after a drill: the watch goes on
            await watching
        await workflow.execute_activity("write_report", start_to_close_timeout=timedelta(minutes=1))
        self._enter("release")
        if kind == "slow":
            await workflow.sleep(timedelta(minutes=2))
        await custody.signal("release", "the run asked")
        return self._speak(kind)

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._events = [*self._events, {"at": workflow.time(), "what": f"{phase} began"}]

    def _speak(self, name: str) -> dict[str, Any]:
        outcome = {"succeed": "succeeded", "fail": "failed", "wait": "aborted", "slow": "aborted"}[name]
        verdict = {
            "outcome": outcome,
            "cleanup": "releasing",
            "message": self._aborted or f"stand-in {outcome}",
            "run_key": KEY,
            "storage": STORAGE,
            "steps": 6,
            "phases": [{"name": "train", "started": self._started, "ended": workflow.time()}],
            "commits": [{"step": 6, "loss": 0.125}],
            "drill": {"proved": True, "committed_step": 4, "resumed_step": 5, "seconds_to_resume": 12.5},
            "artifacts": {"ok": True, "checks": [{"name": "checksums", "ok": True, "detail": ""}]},
            "not_proved": ["multi-node: two ranks ran on one machine"],
        }
        if outcome == "failed":
            raise ApplicationError("failed: stand-in failed", verdict, type="failed")
        return verdict

    @workflow.signal
    def abort(self, reason: Any = None) -> None:
        self._aborted = f"aborted as asked: {reason}"

    @workflow.query
    def progress(self) -> dict[str, Any]:
        return {
            "phase": self._phase,
            "step": 0,
            "steps": 6,
            "loss": None,
            "deadline": self._started + 3600,
            "as_of": self._started,
            "run_key": KEY,
            "storage": STORAGE,
            "custody": self._custody,
            "events": self._events,
        }


async def main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    client = await connect(Settings.load())
    async with Worker(
        client,
        task_queue=RUN_QUEUE,
        workflows=[GuardedTrain, Custody],
        activities=[watch, report],
        workflow_runner=UnsandboxedWorkflowRunner(),
        activity_executor=ThreadPoolExecutor(2),
        max_heartbeat_throttle_interval=timedelta(seconds=1),
    ):
        print("stand-in worker is polling", flush=True)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main())
