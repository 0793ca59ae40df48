"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape

from bench import durability, overhead, recovery, steady
from bench.figure import Experiment, Measured, judge, table, update, write
from bench.lab import Lab, Trouble, lab
from trainer import environment
from trainer.private import NotPrivate
from worker.services import ServiceError
from worker.settings import SettingsError
from worker.setup import SetupError
from worker.stack import StackError

EXPERIMENTS: Final = (
    overhead.EXPERIMENT,
    recovery.EXPERIMENT,
    steady.EXPERIMENT,
    durability.TAKEOVER,
    recovery.LONGER,
    durability.KILLED,
)
RESULTS: Final = Path(__file__).with_name("results.json")
LEAST_PAIRS: Final = 3
"""A median of fewer is not one."""
TRIES: Final = 2
"""A sample that could not be taken is taken once more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 0 when every bar holds, 1 when one does not, 2 when nothing can be measured."""
    options = parser().parse_args(arguments)
    if options.list:
        for experiment in EXPERIMENTS:
            for figure in experiment.figures:
                print(f"{figure.name:28} {figure.bar.text if figure.bar else 'reported':10} {figure.what}")
        return 0
    chosen = [each for each in EXPERIMENTS if not options.only or {f.name for f in each.figures} & set(options.only)]
    console = Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 160)
    try:
        environment.verify()
        measured = asyncio.run(measure(chosen, options.pairs, console))
    except (environment.EnvironmentBroken, NotPrivate, ServiceError, SettingsError, SetupError, StackError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    if options.only:
        measured = [each for each in measured if each.figure.name in options.only]
    table(measured, console)
    if options.output is not None:
        write(measured, options.output)
        console.print(f"wrote {options.output}")
    else:
        enough = [each for each in measured if len(each.samples) >= each.least]
        update(enough, RESULTS, order=[figure.name for experiment in EXPERIMENTS for figure in experiment.figures])
        console.print(f"wrote {len(enough)} figures to {RESULTS}" + kept(len(measured) - len(enough)))
    return 1 if any(each.holds is False for each in measured) else 0


def kept(few: int) -> str:
    """What is said of figures with too few samples."""
    return f"; {few} with fewer than {LEAST_PAIRS} samples are there as they were" if few else ""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    names = [figure.name for experiment in EXPERIMENTS for figure in experiment.figures]
    found = argparse.ArgumentParser(
        prog="python -m bench",
        description="How fast a guarded run is, and how small. Needs the application environment (make application) "
        "and a quiet machine; about half an hour for all figures with three pairs.",
    )
    found.add_argument("--list", action="store_true", help="the figures and their bars")
    found.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help="only this figure (and again for more)"
    )
    found.add_argument("--pairs", type=int, choices=range(1, 21), default=LEAST_PAIRS, metavar="N", help="default 3")
    found.add_argument("--output", type=Path, metavar="FILE", help="write this instead, however few the samples")
    return found


async def measure(experiments: Sequence[Experiment], pairs: int, console: Console) -> list[Measured]:
    """Take all samples on one stack, in turns over the experiments, so that a machine that slows down meanwhile slows
    all of them down."""
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.0f} s  {text}[/]", markup=True)

    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy > cores / 4:
        say(f"[bold yellow]this machine is busy (load {busy:.1f} on {cores} cores): absolute times will be too long")
    samples: dict[int, list[Any]] = {place: [] for place in range(len(experiments))}
    trouble: dict[int, list[str]] = {place: [] for place in range(len(experiments))}
    async with lab(say) as place_of_work:
        for index in range(pairs):
            for place, experiment in enumerate(experiments):
                if experiment.once and index != pairs - 1:
                    continue
                name = ", ".join(figure.name for figure in experiment.figures)
                say(f"{index + 1} of {pairs}: {name} (load {os.getloadavg()[0]:.1f})")
                for _ in range(TRIES):
                    try:
                        samples[place].append(taken := await sample(place_of_work, experiment, index))
                    except (Trouble, RuntimeError, TimeoutError, LookupError, ValueError) as error:
                        text = " ".join((str(error) or type(error).__name__).split())[:1500]
                        trouble[place].append(text)
                        say(f"[red]{escape(f'{name}: {text}')}")
                        continue
                    for figure in experiment.figures:
                        say(escape(f"  {figure.name}: {figure.shows(taken)}"))
                    break
    say("all samples taken")
    return [
        judge(figure, samples[place], trouble[place], 1 if experiment.once else LEAST_PAIRS)
        for place, experiment in enumerate(experiments)
        for figure in experiment.figures
    ]


async def sample(place: Lab, experiment: Experiment, index: int) -> Any:
    """One sample; whatever it left open is released before the next. Raises what taking it raised."""
    place.healthy()
    try:
        return await experiment.sample(place, index)
    finally:
        await asyncio.shield(place.release_everything())


if __name__ == "__main__":
    sys.exit(main())
