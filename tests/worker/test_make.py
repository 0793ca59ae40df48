"""What `make` passes on to the programs that it runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["RUN=s3://b/runs/k"], "trainer.inspect_results 's3://b/runs/k'"),
        (
            ["RUN=s3://b/runs/k", "SUBMISSION=k-parity"],
            "trainer.inspect_results 's3://b/runs/k' --submission 'k-parity'",
        ),
    ],
)
def test_inspect_is_told_the_run_and_the_submission(given: list[str], passed: str) -> None:
    told = subprocess.run(
        ["make", "--dry-run", "inspect", *given], cwd=CHECKOUT, capture_output=True, text=True, check=True, timeout=60
    )
    # A long recipe goes on in the next line.
    [command] = [
        " ".join(line.split()) for line in told.stdout.replace("\\\n", " ").splitlines() if "inspect_results" in line
    ]
    assert command.endswith(passed)
