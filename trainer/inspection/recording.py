"""metrics.rrd: sound to Rerun's own tools, of this run, and equal to metrics.json value by value."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rerun.recording import load_recording

from trainer.inspection.checklist import Failed, require
from trainer.inspection.journal import SCALARS, rows_of, spans
from trainer.inspection.storage import number

APPLICATION_ID = "lanyard"
TIMELINE = "step"
COLUMN = "Scalars:scalars"
ENTITIES = {f"/train/{name}": name for name in SCALARS}
TOOL_TIMEOUT_S = 120.0

Series = dict[str, list[tuple[int, float]]]


def check_tool(recording: Path, *arguments: str) -> str:
    """``rerun rrd <arguments> FILE`` of this environment ends well within 120 s. Raises Failed."""
    command = "rerun rrd " + " ".join(arguments)
    program = Path(sys.executable).parent / "rerun"
    if not program.exists():
        raise Failed([f"{program} is missing; run the inspector with the application environment's python"])
    with tempfile.TemporaryDirectory() as home:
        # Rerun keeps usage statistics under its home; it gets an empty one that says no, and none of our
        # credentials. A file that lacks one of these fields it replaces by its own, which says yes.
        settings = Path(home) / "rerun" / "analytics.json"
        settings.parent.mkdir()
        answer = {"analytics_enabled": False, "analytics_id": "", "metadata": {}}
        places = {"config_file_path": str(settings), "data_dir_path": str(Path(home) / "rerun" / "data")}
        settings.write_text(json.dumps({**places, **answer}))
        environment = {"HOME": home, "XDG_CONFIG_HOME": home, "PATH": os.defpath, "NO_COLOR": "1"}
        # What print writes grows with the run and is not wanted: only its end is kept, on disk.
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [str(program), "rrd", *arguments, str(recording)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(TOOL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise Failed([f"{command} did not end within {TOOL_TIMEOUT_S:.0f} s"]) from None
            finally:
                _end(process)
            output.seek(0)
            said = " ".join(output.read().decode("utf-8", errors="replace").split())[-300:]
    if code != 0:
        raise Failed([f"{command} refuses the recording (exit {code}): {said}"])
    return f"{command} accepts it"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check_recording(recording: Path, submission: str, metrics: Mapping[str, Any]) -> str:
    """The recording is this submission's and holds exactly the journal's steps and values. Raises Failed."""
    series = _decode(recording, submission)
    problems = []
    values = 0
    for entity, name in ENTITIES.items():
        recorded: dict[int, float] = {}
        doubled = []
        for step, value in series.get(entity, []):
            if step in recorded:
                doubled.append(step)
            recorded[step] = value
        journal = {row["step"]: number(row.get(name)) for row in rows_of(metrics)}
        missing = sorted(set(journal) - set(recorded))
        extra = sorted(set(recorded) - set(journal))
        if missing:
            problems.append(f"{entity} lacks step {spans(missing)} of metrics.json")
        if extra:
            problems.append(f"{entity} holds step {spans(extra)}, which metrics.json does not")
        if doubled:
            problems.append(f"{entity} holds step {spans(sorted(set(doubled)))} twice")
        problems += [
            f"{entity}, step {step}: recorded {recorded[step]!r}, metrics.json says {journal[step]!r}"
            for step in sorted(set(journal) & set(recorded))
            if not _equal(journal[step], recorded[step])
        ]
        values += len(recorded)
    problems += [f"{entity} does not belong to the recording" for entity in sorted(set(series) - set(ENTITIES))]
    require(problems)
    return f"{values} values of {len(ENTITIES)} series equal metrics.json"


def _equal(journal: float | None, recorded: float) -> bool:
    if journal is None:
        return False
    return journal == recorded or (math.isnan(journal) and math.isnan(recorded))


def _decode(path: Path, submission: str) -> Series:
    try:
        recording = load_recording(path)
        identity = (recording.application_id(), recording.recording_id())
        chunks: Sequence[Any] = list(recording.chunks())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the native decoder is no Exception
        raise Failed([f"metrics.rrd cannot be decoded: {' '.join(str(error).split())[:300]}"]) from None
    if identity != (APPLICATION_ID, submission):
        raise Failed(
            [
                f"metrics.rrd is a recording of {identity[0]!r} / {identity[1]!r}, "
                f"not of {APPLICATION_ID!r} / {submission!r}: it belongs to another run"
            ]
        )
    series: Series = {}
    for chunk in chunks:
        # Rerun's own notes on the recording (its start time) lie under /__properties.
        if not chunk.entity_path.startswith("/__properties"):
            series.setdefault(chunk.entity_path, []).extend(_rows(chunk))
    return series


def _rows(chunk: Any) -> list[tuple[int, float]]:
    batch = chunk.to_record_batch()
    if TIMELINE not in batch.schema.names or COLUMN not in batch.schema.names:
        raise Failed([f"{chunk.entity_path} is not recorded as scalars on the timeline {TIMELINE!r}"])
    rows = []
    for step, values in zip(batch.column(TIMELINE).to_pylist(), batch.column(COLUMN).to_pylist(), strict=True):
        if type(step) is not int or not isinstance(values, list) or len(values) != 1 or values[0] is None:
            raise Failed([f"{chunk.entity_path}, step {step!r} holds {values!r} where one number belongs"])
        rows.append((step, float(values[0])))
    return rows
