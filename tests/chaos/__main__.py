"""The command line of the crash machine: `python -m tests.chaos`, or `make chaos`."""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.chaos import scenarios
from tests.chaos.carrying import Row, carry
from tests.chaos.lane import Lane, small_disks_possible
from tests.chaos.results import RESULTS, Results, good, summary
from tests.chaos.scenarios import Scenario

INTERRUPTED: Final = 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Strikes guarded runs at every instant and judges what is left. Real operator, Temporal, S3 and "
        "kills; in the light slice a light process is in Ray's place. Scenarios that are recorded as finished are not "
        "run again; results are in bench/chaos.json and bench/chaos.html. Exit status 1 when something is wrong.",
    )
    found.add_argument("--slice", choices=("light", "real", "all"), default="light", help="default light")
    found.add_argument("--seed", type=int, default=0, help="which scenarios, and their accidents (default 0)")
    found.add_argument("--only", default="", metavar="WORDS", help="only scenarios whose name has all these words")
    found.add_argument("--shard", default="1/1", metavar="K/N", help="the k-th of n parts of about equal length")
    found.add_argument("--lanes", type=int, default=0, metavar="N", help="scenarios at once (default 3 light, 1 real)")
    found.add_argument("--again", action="store_true", help="run recorded scenarios again too")
    found.add_argument("--failed", action="store_true", help="run those again that went wrong")
    found.add_argument("--list", action="store_true", help="name the scenarios, and run nothing")
    found.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="default bench/chaos.json")
    found.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="add these files of other shards")
    return found


def chosen(options: argparse.Namespace) -> list[Scenario]:
    """The scenarios that the options name. Raises ValueError."""
    found: list[Scenario] = []
    if options.slice in ("light", "all"):
        found += scenarios.light(options.seed)
    if options.slice in ("real", "all"):
        found += scenarios.real(options.seed)
    words = options.only.lower().split()
    return [each for each in scenarios.shard(found, options.shard) if all(word in each.id for word in words)]


@functools.cache
def known(seed: int) -> frozenset[str]:
    """The names of all scenarios of a seed."""
    return frozenset(each.id for each in (*scenarios.light(seed), *scenarios.real(seed)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the machine; 0 when nothing is wrong, 1 when something is, 2 when it cannot run, 130 when interrupted."""
    options = parser().parse_args(arguments)
    results = Results(options.results)
    try:
        wanted = chosen(options)
        recorded = results.rows()
        for path in options.merge or ():
            recorded = {**recorded, **Results(path).rows()}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.merge:
        # A scenario that the code has no more, such as one of a point that is gone, is no result of it.
        told = results.add(row for row in recorded.values() if row["id"] in known(row["seed"]))
        print(f"{told['scenarios']} scenarios in {options.results}")
        return 0 if all(good(row) for row in told["rows"]) else 1
    if options.list:
        for each in wanted:
            print(f"{each.id:90} {' or '.join(sorted(each.expected))}")
        print(f"{len(wanted)} scenarios, about {sum(each.takes_s for each in wanted) / 60:.0f} lane-minutes")
        return 0

    def done(each: Scenario) -> bool:
        row = recorded.get((each.id, options.seed))
        return row is not None and not options.again and (good(row) or not options.failed)

    left = [each for each in wanted if not done(each)]
    if any(each.victim == "disk full" for each in left) and not small_disks_possible():
        print("no disk can be filled here (a small one cannot be mounted): scenarios of `disk full` are left out")
        left = [each for each in left if each.victim != "disk full"]
    print(f"{len(left)} scenarios to run, {len(wanted) - len(left)} recorded or left out", flush=True)
    try:
        status = asyncio.run(run(left, options, results))
    except ExceptionGroup as errors:
        print("\n".join(f"error: {error}" for error in errors.exceptions), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted; what was finished is recorded", file=sys.stderr)
        return INTERRUPTED
    rows = [row for (name, _), row in results.rows().items() if name in {each.id for each in wanted}]
    told = summary(rows)
    print(
        f"{told['scenarios']} scenarios: {told['leaks']} with leaks, {told['wrong_verdicts']} wrong verdicts, "
        f"{told['not_carried_out']} not carried out; {options.results}"
    )
    return status or (0 if all(good(row) for row in rows) else 1)


async def run(left: Sequence[Scenario], options: argparse.Namespace, results: Results) -> int:
    """Carry the scenarios out, each lane one at a time. SIGINT and SIGTERM end it with nothing left."""
    me = asyncio.current_task()
    assert me is not None
    loop = asyncio.get_running_loop()
    for ending in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(ending, me.cancel)
    queues = {which: [each for each in left if each.slice == which] for which in ("light", "real")}
    began, finished = time.monotonic(), 0
    async with asyncio.TaskGroup() as group:

        async def lane(which: str, number: int) -> None:
            nonlocal finished
            place = Path(tempfile.mkdtemp(prefix=f"lc{number}-"))
            made = Lane(place, which, print)
            try:
                await made.start()
                while queues[which]:
                    scenario = queues[which].pop(0)
                    row = await carry(made, scenario, options.seed)
                    finished += 1
                    results.add([row.json()])
                    print(_line(row, finished, len(left), time.monotonic() - began), flush=True)
            finally:
                await asyncio.shield(made.stop())
                shutil.rmtree(place, ignore_errors=True)

        for which, usual in (("light", 3), ("real", 1)):
            for number in range(min(options.lanes or usual, len(queues[which]))):
                group.create_task(lane(which, number))
    return 0


def _line(row: Row, finished: int, total: int, seconds: float) -> str:
    wrong = [*row.leaks, *row.wrong, *([row.trouble] if row.trouble else [])]
    said = "ok  " if row.good else "BAD "
    told = f"[{finished}/{total} {seconds:5.0f} s] {said}{row.id}: {row.outcome or '-'}, {row.cleanup or '-'}"
    load = os.getloadavg()[0]
    return f"{told}, {row.seconds} s (load {load:.1f})" + "".join(f"\n      {line[:400]}" for line in wrong)


if __name__ == "__main__":
    sys.exit(main())
