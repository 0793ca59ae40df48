"""A script workload of the light slice that misbehaves as its argument says: `fail` or `stall`."""

from __future__ import annotations

import sys

from trainer.application import main

sys.exit(main(sys.argv[1]))  # type: ignore[call-arg]  # it is light/application.py, once delivered
