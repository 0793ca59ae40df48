"""A training of long intervals, aborted: its speed against bare torchrun, when commits are seen, memory, release."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final
from urllib.parse import urlsplit

from bench.figure import Experiment, Figure, at_least, at_most, middle
from bench.guarded import Ended, release_began
from bench.lab import STORAGE, Lab, Trouble, complete
from bench.plain_ray import free_ports
from bench.watching import RunEnded, watch
from worker.settings import CHECKOUT

INTERVAL: Final = 2000
COMMITS: Final = 16
"""How many commits are seen before the abort; the run could make 50 times as many. The first few share the machine with
the spare processes that hosts prepare at a training's start."""
RECIPE: Final = {"steps": INTERVAL * COMMITS * 50, "checkpoint_interval": INTERVAL}
TRAIN_LIMIT_S: Final = 600.0


@dataclass(frozen=True)
class Pair:
    ours: tuple[float, ...]
    """Steps per second of each interval but the first, which holds the first steps' imports."""
    bare: tuple[float, ...]
    latencies_s: tuple[float, ...]
    memory_mb: float
    stopped_s: float | None
    """None where the job was not seen to stop before its cluster was ended."""
    gone_s: float
    release_steps: dict[str, float]

    @property
    def ratio(self) -> float:
        return median(self.ours) / median(self.bare)


async def pair(lab: Lab, index: int) -> Pair:
    """Torchrun and a guarded run of the same recipe, in turns first."""
    bare: dict[str, Any] = {}
    if index % 2:
        bare = await torchrun(lab)
    run = await lab.start("steady", RECIPE)
    root = run.root(f"{STORAGE}/guarded")
    try:
        seen = await watch(lab.client, lab.s3, run, root, lab.worker_pid, COMMITS, TRAIN_LIMIT_S)
    except RunEnded:
        await run.end("aborted")  # raises, saying how it ended
        raise Trouble(f"{run.workflow_id} was aborted by somebody else") from None
    asked = time.time()
    await run.abort()
    ended = await run.end("aborted")
    if not index % 2:
        bare = await torchrun(lab)
    steps = journal(lab, root)
    if steps[INTERVAL * COMMITS - 1]["loss"] != bare["loss"]:
        raise Trouble("torchrun's loss differs from the run's: bench/bare_loop.py is not the same training any more")
    stopped = job_stopped(ended)
    return Pair(
        ours=tuple(round(each, 1) for each in rates(steps)[1:]),
        bare=tuple(round(each, 1) for each in bare["rates"][1:]),
        latencies_s=tuple(seen.latencies()),
        memory_mb=round(median(seen.memory), 1),
        stopped_s=None if stopped is None else round(stopped - asked, 3),
        gone_s=round(ended.release["ended"] - asked, 3),
        release_steps={name(each): round(each["seconds"], 3) for each in ended.release["steps"]},
    )


async def torchrun(lab: Lab) -> dict[str, Any]:
    """The bare loop over the same steps, two processes on this machine."""
    return await lab.program(
        *("--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"),
        *("--master-port", str(free_ports(1)[0]), str(CHECKOUT / "bench" / "bare_loop.py")),
        *(str(INTERVAL * COMMITS), str(INTERVAL), json.dumps(complete(RECIPE))),
        name="torchrun",
        # One thread a process, which torchrun and Ray both set for themselves.
        variables={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


def journal(lab: Lab, root: str) -> list[dict[str, Any]]:
    """The steps journaled in the run's last commit."""
    bucket, path = urlsplit(root).netloc, urlsplit(root).path.lstrip("/")

    def read(key: str) -> dict[str, Any]:
        body = lab.s3.get_object(Bucket=bucket, Key=f"{path}/train/main/{key}")["Body"].read()
        told: dict[str, Any] = json.loads(body)
        return told

    latest = read("checkpoint_manager_snapshot.json")["latest_checkpoint_result"]["checkpoint_dir_name"]
    steps: list[dict[str, Any]] = read(f"{latest}/journal.json")["steps"]
    return steps


def rates(steps: Sequence[dict[str, Any]]) -> list[float]:
    """Steps per second of each whole interval, from the journaled time of each step."""
    batch = 2 * complete(RECIPE)["batch_size"]
    taken = [batch / step["samples_per_second"] for step in steps]
    whole = len(taken) // INTERVAL
    return [INTERVAL / sum(taken[part * INTERVAL : (part + 1) * INTERVAL]) for part in range(whole)]


def job_stopped(ended: Ended) -> float | None:
    """When custody saw the job terminal, with no actor and no placement group left; Unix seconds.

    The release begins with the tombstone, and the job is what it releases first: its steps are timed, one after the
    other.
    """
    at = release_began(ended.custody_history)
    for each in ended.release["steps"]:
        at += each["seconds"]
        if each["action"] == "stop":
            return at if each["ok"] else None
    return None


def name(step: Mapping[str, Any]) -> str:
    """A release's step, for people; the detail where it failed."""
    kind = str(step["claim"]).partition("/")[0]
    return f"{step['action']} {kind}" + ("" if step["ok"] else f" FAILED ({str(step['detail'])[:120]})")


def explain_speed(pairs: Sequence[Pair]) -> str:
    return (
        f"{median(median(each.ours) for each in pairs):.0f} steps/s in a guarded run, "
        f"{median(median(each.bare) for each in pairs):.0f} bare; a step costs the journal one copy of the parameters, "
        "and the run shares this machine with Ray's two nodes, Temporal, S3 and the worker"
    )


def explain_latency(pairs: Sequence[Pair]) -> str:
    found = sorted(itertools.chain.from_iterable(each.latencies_s for each in pairs))
    return (
        f"{len(found)} commits, {found[0]:.2f} to {found[-1]:.2f} s; from the date of Ray's commit record in S3 to the "
        "server's date of the first heartbeat that told it (both of this machine's clock, to the millisecond)"
    )


def explain_release(pairs: Sequence[Pair]) -> str:
    steps = dict.fromkeys(step for each in pairs for step in each.release_steps)
    taken = {step: median(each.release_steps.get(step, 0.0) for each in pairs) for step in steps}
    return "custody's steps: " + ", ".join(f"{step} {value:.1f} s" for step, value in taken.items() if value >= 0.1)


EXPERIMENT: Final = Experiment(
    sample=pair,
    figures=(
        Figure(
            name="commit-to-heartbeat",
            what="commit written → in the watch's heartbeat, median",
            unit="s",
            bar=at_most(1.0),
            value=lambda pairs: middle([each for one in pairs for each in one.latencies_s]),
            explain=explain_latency,
            shows=lambda each: each.latencies_s,
        ),
        Figure(
            name="steps-per-second-ratio",
            what="optimizer steps per second between commits ÷ bare torchrun of the same loop",
            unit="",
            bar=at_least(0.9),
            value=lambda pairs: middle([each.ratio for each in pairs]),
            explain=explain_speed,
            shows=lambda each: {"ratio": round(each.ratio, 3), "guarded": each.ours, "torchrun": each.bare},
        ),
        Figure(
            name="abort-to-job-stopped",
            what="abort → job stopped, its actors and placement groups gone",
            unit="s",
            bar=None,
            value=lambda pairs: middle(found) if (found := [e.stopped_s for e in pairs if e.stopped_s]) else None,
            explain=lambda pairs: (
                "logs and status are saved first, then custody raises the tombstone and stops the job"
            ),
            shows=lambda each: each.stopped_s,
        ),
        Figure(
            name="abort-to-proved-gone",
            what="abort → everything proved gone, twice",
            unit="s",
            bar=None,
            value=lambda pairs: middle([each.gone_s for each in pairs]),
            explain=explain_release,
            shows=lambda each: {"seconds": each.gone_s, "steps": each.release_steps},
        ),
        Figure(
            name="worker-memory",
            what="worker's resident memory while it watches one run",
            unit="MB",
            bar=None,
            value=lambda pairs: middle([each.memory_mb for each in pairs]),
            explain=lambda pairs: "median of four looks a second",
            shows=lambda each: each.memory_mb,
        ),
    ),
)
