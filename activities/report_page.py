"""`report.html`: a report as one page that opens from disk, with no network and no script. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from activities.report_chart import Chart, Mark, loss_chart
from activities.report_material import number
from workflows.names import custody_id
from workflows.orders import MAIN

TEMPLATE: Final = "report.html.j2"
MAX_MARKS: Final = 6
"""Kill and resumes shown on the curve; the table of attempts has them all."""
WIDE: Final = (860, 340)
NARROW: Final = (360, 300)
"""Two drawings of the curve, so that its words are readable on a laptop and on a phone."""

_TONES: Final = {
    "succeeded": "good",
    "clean": "good",
    "aborted": "fair",
    "cancelled": "fair",
    "releasing": "fair",
}
_CLEANUP: Final = {
    "clean": "everything claimed was released, and proved absent twice",
    "releasing": "custody is still releasing; its own result is the final word",
    "unproved": "that nothing is left was not proved",
}


def render(report: dict[str, Any]) -> str:
    """The page of a report as `activities.reporting.report` makes it. Equal reports give equal pages."""
    return _environment().get_template(TEMPLATE).render(view(report))


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "short": short,
        "clock": clock,
        "duration": duration,
        "figure": figure,
        "tone": lambda word: _TONES.get(str(word), "bad"),
        "words": lambda text: str(text).replace("_", " "),
    }
    return made


def view(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the template shows, worked out."""
    found = report["material"]
    release = found["release"]
    cleanup = (release or report)["cleanup"]
    ranks, attempts = found["placement"], found["attempts"]
    marks = _marks(report, attempts)
    return {
        "r": report,
        "m": found,
        "cleanup": cleanup,
        "cleanup_means": _CLEANUP.get(cleanup, ""),
        "release": release,
        "custody": custody_id(report["run_key"]),
        "figures": _figures(report, attempts),
        "next": _next(report, cleanup),
        "timeline": _timeline(report, attempts),
        "charts": _charts(found, marks),
        "marks": marks,
        "ranks": [_rank_row(row, report["victim"]) for row in ranks],
        "trains": sorted({row["train"] for row in ranks}),
        "artifact_figures": _flat((report["artifacts"] or {}).get("figures", {})),
        "hosts": _hosts(report, found),
    }


def short(text: Any, length: int = 8) -> str:
    """The beginning of a long identifier."""
    told = "" if text is None else str(text)
    return told if len(told) <= length + 2 else told[:length] + "…"


def clock(at: Any) -> str:
    """POSIX seconds as a time of day in UTC."""
    told = number(at)
    try:
        return datetime.fromtimestamp(told, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if told is not None else "—"
    except (ValueError, OverflowError, OSError):
        return "—"


def duration(seconds: Any) -> str:
    """Seconds as people say them."""
    told = number(seconds)
    if told is None:
        return "—"
    if told < 0:
        return "0 s"
    if told < 59.95:
        return f"{told:.2f} s" if told < 1 else f"{told:.1f} s"
    minutes, rest = divmod(round(told), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def figure(value: Any) -> str:
    """A measured value with six significant digits; anything else as it is."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "—"}[value]
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _figures(report: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The few numbers that come first."""
    found = report["material"]
    commits = [c for c in found["commits"] if c["train"] == MAIN]
    points = found["loss"]["points"] if found["loss"] else []
    checked = (report["artifacts"] or {}).get("figures", {})
    held_out = found["held_out"] or {}
    # The journal ends at the last step; commits may end before it.
    loss = number(checked.get("final_loss"))
    if loss is None and points:
        loss = points[-1][1]
    last = commits[-1]["step"] if commits else 0
    before, after = held_out.get("initial_loss"), held_out.get("final_loss")
    return [
        {
            "name": "Steps committed",
            "value": f"{last:,}" + (f" of {report['steps']:,}" if report["steps"] else ""),
            "note": f"{found['commits_total']:,} commits" if commits else "no commit",
        },
        {
            "name": "Final loss" if report["outcome"] == "succeeded" else "Last known loss",
            "value": figure(loss),
            "note": f"at step {points[-1][0]:,}" if points else "no loss was recorded",
        },
        {
            "name": "Held-out loss",
            "value": figure(after),
            "note": f"from {figure(before)} before training" if before is not None else "not available",
        },
        {"name": "Time lost to recovery", **recovery(report, last, attempts)},
        {"name": "Total time", **_total(report["phases"])},
    ]


def recovery(report: Mapping[str, Any], last: int, attempts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The time lost, as far as evidence tells it; ``last`` is the last committed step."""
    drill = report["drill"]
    if drill and drill["seconds_to_resume"] is not None:
        return {"value": duration(drill["seconds_to_resume"]), "note": "from the kill to the last rank's next step"}
    again = [each for each in attempts if each["train"] == MAIN][1:]
    if again:
        taken = [each["first_step_at"] - each["started"] for each in again if each["first_step_at"] and each["started"]]
        times = f"training started again {len(again)} time(s)"
        if len(taken) < len(again):
            return {"value": "not recovered", "note": f"{times}, and did not come to a step each time"}
        # Nobody saw when it was interrupted: that is not in the evidence.
        return {"value": f"over {duration(sum(taken))}", "note": f"{times}; from the ranks' start to the next step"}
    if report["outcome"] == "failed" and attempts and last < (report["steps"] or 0):
        return {"value": "not recovered", "note": "training did not go on"}
    return {"value": "none", "note": "no interruption was seen"}


def _total(phases: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    ended = [p["ended"] for p in phases if p["ended"] is not None]
    if not ended:
        return {"value": "—", "note": "not recorded"}
    began = min(p["started"] for p in phases)
    return {"value": duration(max(ended) - began), "note": f"from {clock(began)}"}


def _next(report: Mapping[str, Any], cleanup: str) -> list[dict[str, str]]:
    """What the person does next: a sentence each, some with a line to copy."""
    said = []
    last = max((c["step"] for c in report["material"]["commits"] if c["train"] == MAIN), default=None)
    custody = custody_id(report["run_key"])
    if cleanup != "clean":
        said.append(
            {
                "text": "Cleanup is not proved. Look at custody, which goes on until everything is gone. Do not "
                "terminate it: it is what stops the billing.",
                "code": f"temporal workflow describe --workflow-id {custody}",
            }
        )
    if report["outcome"] == "succeeded":
        said += _inspection("The artifacts are in storage, and can be checked at any time.", report["storage"])
    elif report["resume_from"] and last is not None and report["steps"] and last >= report["steps"]:
        said += _inspection(
            "Every step was trained and committed, so there is nothing left to go on with: mend what is said above and "
            "start again. What lies in storage can be checked.",
            report["storage"],
        )
    elif report["resume_from"]:
        where = f" (step {last:,})" if last is not None else ""
        said.append(
            {
                "text": f"What was committed is kept: go on from the last commit{where}. Add this to run.json and "
                "start it under a new workflow id:",
                "code": '"resume": ' + json.dumps({"from": report["resume_from"]}),
            }
        )
    else:
        text = "Nothing was committed, so there is nothing to go on from: mend the cause and start again."
        said.append({"text": text, "code": ""})
    return said


def _inspection(lead: str, storage: str) -> list[dict[str, str]]:
    """How to check artifacts again: the page is read when the embedded S3 server may have long stopped."""
    return [
        {
            "text": f"{lead} The embedded S3 server stops with its stack or demo: start it again, in another shell.",
            "code": "make stack",
        },
        {
            "text": "Take its address and keys, then check everything yourself, from storage alone. With S3 of your "
            "own only the last line is needed, in a shell that has its variables.",
            "code": f". ${{LANYARD_HOME:-.lanyard}}/env\nmake inspect RUN={storage}",
        },
    ]


def _timeline(report: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Phases as bars, in percent of the whole; moments as lines across them."""
    phases = report["phases"]
    times = [t for p in phases for t in (p["started"], p["ended"]) if t is not None]
    if not times:
        return {"rows": [], "moments": [], "whole": None}
    began, whole = min(times), max(max(times) - min(times), 1e-9)

    def percent(at: float) -> float:
        return float(round(min(max((at - began) / whole, 0.0), 1.0) * 100, 2))

    rows = [
        {
            "name": p["name"],
            "note": p["note"],
            "offset": p["started"] - began,
            "seconds": p["ended"] - p["started"] if p["ended"] is not None else None,
            "left": percent(p["started"]),
            "size": round(percent(p["ended"] if p["ended"] is not None else max(times)) - percent(p["started"]), 2),
        }
        for p in phases
    ]
    strike = report["strike"]
    moments = []
    if strike and strike["outcome"] == "killed":
        moments.append({"kind": "kill", "at": strike["at"], "label": "kill"})
    resumed = [a for a in attempts if a["train"] == MAIN and a["restored_step"] and a["first_step_at"] is not None]
    moments += [
        {"kind": "resume", "at": a["first_step_at"], "label": f"step {a['first_step']} after resume"}
        for a in resumed[:MAX_MARKS]
    ]
    inside = [m | {"left": percent(m["at"]), "offset": m["at"] - began} for m in moments]
    return {"rows": rows, "moments": inside, "whole": whole, "began": began}


def _marks(report: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Kill and resumes, by step."""
    marks = []
    victim, strike = report["victim"], report["strike"]
    if victim:
        step = victim["commit"]["step"]
        word = (
            "killed" if strike and strike["outcome"] == "killed" else "struck" if strike else "chosen, struck or not,"
        )
        marks.append(Mark("kill", step, f"rank {victim['rank']} {word} after step {step:,}"))
    for attempt in attempts:
        step, restored = attempt["first_step"], attempt["restored_step"]
        if attempt["train"] != MAIN or not restored:
            continue
        at = step if step is not None else restored + 1
        again = "earlier run’s step" if attempt["attempt"] == 1 else "step"
        marks.append(Mark("resume", at, f"resumed from {again} {restored:,}"))
    return marks[:MAX_MARKS]


def _charts(found: Mapping[str, Any], marks: Sequence[Mark]) -> list[Chart]:
    points = found["loss"]["points"] if found["loss"] else []
    commits = [(c["step"], c["loss"]) for c in found["commits"] if c["train"] == MAIN]
    drawn = (loss_chart(name, points, commits, marks, *size) for name, size in (("wide", WIDE), ("narrow", NARROW)))
    return [chart for chart in drawn if chart]


def _rank_row(row: Mapping[str, Any], victim: Mapping[str, Any] | None) -> dict[str, Any]:
    struck = (
        victim is not None
        and row["train"] == MAIN
        and (row["rank"], row["attempt"]) == (victim["rank"], victim["attempt"])
    )
    return {**row, "struck": struck}


def _hosts(report: Mapping[str, Any], found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Hosts by their receipts; where those are not to be had, as the run knew them."""
    if found["hosts"]:
        return list(found["hosts"])
    known = report["hosts"]["hosts"] if report["hosts"] else ()
    return [{**host, "pid": None, "freeze_sha256": None, "at": None} for host in known]


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Nested figures as rows of name and value."""
    if isinstance(value, dict):
        return [row for key, item in value.items() for row in _flat(item, f"{name} {key}".strip())][:200]
    if isinstance(value, list):
        return [(name, ", ".join(figure(item) for item in value[:50]))]
    return [(name, figure(value))]
