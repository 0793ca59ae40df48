"""A Ray cluster of two nodes that somebody prepared, with a job of theirs on it. In the application's Python:

    python -m tests.integration.prepared_cluster SCRATCH

Prints one line of JSON once it is up (endpoint, token file, the job's id), and takes all of it down on SIGTERM.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from bench.plain_ray import PlainCluster, end_on_sigterm

SOMEBODY_ELSES = "somebody-elses"


def main(scratch: Path) -> None:
    end_on_sigterm()
    cluster = PlainCluster(scratch)
    try:
        cluster.start()
        source = scratch / "source"
        source.mkdir()
        cluster.submit_only(SOMEBODY_ELSES, ["sleep", "7200"], source, {})
        told = {"endpoint": cluster.dashboard, "token_file": str(scratch / "token"), "job": SOMEBODY_ELSES}
        print(json.dumps(told), flush=True)
        while True:
            signal.pause()
    finally:
        cluster.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
