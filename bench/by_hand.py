"""The same training by hand: what a person does who has this application, two nodes and no operator.

    python -m bench.by_hand --scratch DIR --source DIR --storage s3://… --recipe JSON --pins JSON

Start two nodes, `ray job submit`, wait, stop both, download, inspect, `rerun rrd verify`, reload. Each step follows the
one before without a pause. Prints one JSON line: the seconds of each step and of all. Runs in the application's Python.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from pathlib import Path

from pyarrow import fs

from bench.plain_ray import PlainCluster, Trouble, arguments, end_on_sigterm, order
from trainer import storage

RELOAD = """
import sys, torch, rerun
from pathlib import Path
exports = Path(sys.argv[1])
state = torch.load(exports / "state.pt", weights_only=True)
assert state["step"] == int(sys.argv[2]) and state["model"] and state["optimizer"]
assert sum(1 for _ in rerun.recording.load_recording(exports / "metrics.rrd").chunks())
"""


class Stopwatch:
    """Seconds of consecutive steps."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self.steps: dict[str, float] = {}

    def lap(self, step: str) -> None:
        now = time.monotonic()
        self.steps[step] = round(now - self._last, 3)
        self._last = now

    @property
    def total(self) -> float:
        return round(self._last - self._began, 3)


def main() -> int:
    """Do it all; returns the exit status."""
    options = arguments(__doc__).parse_args()
    end_on_sigterm()
    watch = Stopwatch()
    job = order(f"by-hand-{secrets.token_hex(5)}", options.storage, options.recipe, options.pins)
    cluster = PlainCluster(options.scratch)
    try:
        cluster.start()
        watch.lap("start the nodes")
        cluster.submit(
            job["submission_id"],
            ["python", "-m", "trainer.application"],
            options.source,
            {"LANYARD_JOB": json.dumps(job)},
        )
        watch.lap("job")
    finally:
        cluster.stop()
    watch.lap("stop the nodes")
    copy = options.scratch / "copy"
    # As `aws s3 cp --recursive` would, in a process that is there already.
    fs.copy_files(
        job["storage"].removeprefix("s3://"),
        str(copy),
        source_filesystem=storage.filesystem(),
        destination_filesystem=fs.LocalFileSystem(),
    )
    watch.lap("download")
    python = sys.executable
    exports = copy / "exports" / job["submission_id"]
    run(python, "-m", "trainer.inspect_results", str(copy), "--submission", job["submission_id"])
    watch.lap("inspect")
    run(str(Path(python).with_name("rerun")), "rrd", "verify", str(exports / "metrics.rrd"))
    watch.lap("rrd verify")
    run(python, "-c", RELOAD, str(exports), str(options.recipe["steps"]))
    watch.lap("reload")
    print(json.dumps({"seconds": watch.total, "steps": watch.steps}))
    return 0


def run(*command: str) -> None:
    """One command that must succeed. Raises Trouble."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise Trouble(f"{command[:3]} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
