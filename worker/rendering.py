"""How a run and its verdict look in a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from worker.observation import Sight

_STYLES: Final = {
    "succeeded": "bold green",
    "clean": "bold green",
    "aborted": "bold yellow",
    "cancelled": "bold yellow",
    "releasing": "bold yellow",
}


def panel(sight: Sight, elapsed_s: float, ui: str, word: str) -> RenderableType:
    """The live view: `word`, phase, committed step of total, loss, elapsed, deadline, the run's page.

    What needs attention comes first: a terminal that is too low for everything crops the end.
    """
    step, steps = sight.number("step"), sight.number("steps")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("phase", Text(sight.text("phase") or "starting", style="bold"))
    grid.add_row("committed step", f"{_count(step)} of {_count(steps)}")
    if step is not None and steps:
        grid.add_row("", ProgressBar(total=steps, completed=min(step, steps), width=40))
    grid.add_row("loss", _figure(sight.number("loss")))
    grid.add_row("elapsed", duration(elapsed_s))
    grid.add_row("deadline", _deadline(sight.number("deadline")))
    grid.add_row("now", Text(sight.text("note") or "—"))
    grid.add_row("Temporal UI", Text(ui, style="cyan"))
    told = [_whole(word, "bold yellow"), _whole(sight.trouble, "yellow")]
    return Group("", *(text for text in told if text), grid)


def _whole(text: str, style: str) -> Text:
    """Text that wraps in the live view too, which otherwise crops: the console leaves long lines to the terminal."""
    return Text(text, style=style, no_wrap=False, overflow="fold")


def line(sight: Sight, elapsed_s: float) -> str:
    """The same in one line, for a log."""
    parts = [
        f"[{duration(elapsed_s)}]",
        sight.text("phase") or "starting",
        f"step {_count(sight.number('step'))} of {_count(sight.number('steps'))}",
        f"loss {_figure(sight.number('loss'))}",
        f"deadline {_deadline(sight.number('deadline'))}",
    ]
    return "  ".join(parts)


def change(sight: Sight) -> tuple[object, ...]:
    """What must differ for `line` to be worth printing again."""
    return sight.text("phase"), sight.text("step"), sight.trouble


def verdict_table(verdict: Mapping[str, Any], custody: Mapping[str, Any]) -> Table:
    """The verdict as a table; what a verdict does not hold has no row."""
    outcome, cleanup = str(verdict.get("outcome", "unknown")), final_cleanup(verdict, custody)
    table = Table(title="Verdict", show_header=False, title_justify="left", pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, value: object, style: str = "") -> None:
        if value not in (None, "", [], (), {}):
            table.add_row(name, Text(str(value), style=style))

    row("outcome", outcome, _STYLES.get(outcome, "bold red"))
    row("cleanup", cleanup, _STYLES.get(cleanup, "bold red"))
    row("message", verdict.get("message"))
    row("run", verdict.get("run_key"))
    row("storage", verdict.get("storage"))
    commits = _list(verdict.get("commits"))
    resumed = _dict(verdict.get("resumed"))
    row("resumed from", f"{resumed.get('source')}, step {resumed.get('step')}" if resumed else None)
    row("commits", _commits(commits, verdict.get("steps")))
    loss = _number(_final_loss(verdict, commits))
    row("final loss", _figure(loss) if loss is not None else None)
    row("time", _phases(_list(verdict.get("phases"))))
    row("hosts", _hosts(_dict(verdict.get("hosts"))))
    _add_drill(row, verdict)
    _add_artifacts(row, _dict(verdict.get("artifacts")))
    _add_release(row, custody or _dict(verdict.get("release")))
    row("resume from", verdict.get("resume_from") if outcome != "succeeded" else None)
    row("not proved", "\n".join(f"- {item}" for item in _list(verdict.get("not_proved"))))
    return table


def final_cleanup(verdict: Mapping[str, Any], custody: Mapping[str, Any]) -> str:
    """Custody's own result is the last word on cleanup; the verdict's was written a little earlier."""
    return str(custody.get("cleanup") or verdict.get("cleanup") or "unproved")


def duration(seconds: float) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _add_drill(row: Any, verdict: Mapping[str, Any]) -> None:
    victim, strike = _dict(verdict.get("victim")), _dict(verdict.get("strike"))
    if victim:
        how = f", {strike.get('outcome', '').replace('_', ' ')}" if strike else ""
        step = _dict(victim.get("commit")).get("step", "?")
        row("drill", f"rank {victim.get('rank')} on {victim.get('address')} after commit {step}{how}")
    drill = _dict(verdict.get("drill"))
    if not drill:
        return
    proved = drill.get("proved")
    row("recovery", "proved" if proved else "NOT proved", "green" if proved else "bold red")
    for problem in _list(drill.get("problems")):
        row("", problem, "red")
    if drill.get("resumed_step") is not None:
        row("went on", f"step {drill.get('committed_step')} committed, step {drill.get('resumed_step')} first after it")
    seconds = _number(drill.get("seconds_to_resume"))
    row("time to resume", f"{seconds:.1f} s" if seconds is not None else None)
    row("parity", str(drill.get("parity", "")).replace("_", " "))


def _add_artifacts(row: Any, artifacts: Mapping[str, Any]) -> None:
    if not artifacts:
        return
    checks = [check for check in _list(artifacts.get("checks")) if isinstance(check, dict)]
    failed = [check for check in checks if not check.get("ok")]
    ok = bool(artifacts.get("ok"))
    skipped = len(_list(artifacts.get("not_applicable")))
    passed = f"{len(checks) - len(failed)} of {len(checks)} checks passed"
    row("artifacts", passed + (f", {skipped} not applicable" if skipped else ""), "green" if ok else "bold red")
    for check in failed:
        row("", f"{check.get('name')}: {check.get('detail')}", "red")


def _add_release(row: Any, release: Mapping[str, Any]) -> None:
    if not release:
        return
    claims, steps = _list(release.get("claims")), _list(release.get("steps"))
    began, ended = _number(release.get("began")), _number(release.get("ended"))
    took = f" in {duration(ended - began)}" if began is not None and ended is not None else ""
    row("released", f"{len(claims)} claims, {len(steps)} steps{took} ({release.get('reason', '')})")
    remaining = _list(release.get("remaining"))
    row("still there", "\n".join(str(item) for item in remaining), "bold red")


def _commits(commits: Sequence[Any], steps: Any) -> str | None:
    last = _dict(commits[-1]).get("step") if commits else None
    return f"{last} of {steps if steps is not None else '?'} steps committed" if last is not None else None


def _final_loss(verdict: Mapping[str, Any], commits: Sequence[Any]) -> Any:
    figures = _dict(_dict(verdict.get("artifacts")).get("figures"))
    return figures.get("final_loss", _dict(commits[-1]).get("loss") if commits else None)


def _phases(phases: Sequence[Any]) -> str:
    known = [phase for phase in phases if isinstance(phase, dict)]
    return ", ".join(
        f"{phase.get('name')} {duration(phase['ended'] - phase['started'])}"
        for phase in known
        if _number(phase.get("ended")) is not None and _number(phase.get("started")) is not None
    )


def _hosts(hosts: Mapping[str, Any]) -> str | None:
    known = [host for host in _list(hosts.get("hosts")) if isinstance(host, dict)]
    if not known:
        return None
    return f"{len(known)} ({hosts.get('provider')}): " + ", ".join(f"{h.get('role')} {h.get('address')}" for h in known)


def _deadline(at: float | None) -> str:
    if at is None:
        return "—"
    left = at - time.time()
    clock = time.strftime("%H:%M:%S", time.localtime(at))
    return f"{clock} (in {duration(left)})" if left > 0 else f"{clock} (passed)"


def _count(value: float | None) -> str:
    return "—" if value is None else f"{value:.0f}"


def _figure(value: float | None) -> str:
    return "—" if value is None else f"{value:.6g}"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
