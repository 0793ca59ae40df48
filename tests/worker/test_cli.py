from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.worker.conftest import clean_environment
from worker.settings import CHECKOUT
from worker.version import __version__


def worker(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "worker", *arguments],
        cwd=CHECKOUT,
        env={**clean_environment(), "TEMPORAL_CONFIG_FILE": os.devnull, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_names_every_command_and_every_setting() -> None:
    text = worker("--help").stdout
    for name in ("run", "setup", "stack", "demo", "schema", "LANYARD_HOME", "LANYARD_SECRET_FILE", "TEMPORAL_ADDRESS"):
        assert name in text
    assert worker("--version").stdout == f"lanyard {__version__}\n"


def test_the_schema_is_json_and_names_its_dialect() -> None:
    schema = json.loads(worker("schema").stdout)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert {"storage", "workload"} <= schema["properties"].keys()


def test_a_service_that_does_not_answer_is_named_in_one_line() -> None:
    done = worker("setup", TEMPORAL_ADDRESS="127.0.0.1:9", LANYARD_DEPLOYMENT="tests")
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_setting_that_cannot_be_used_exits_2_with_its_name() -> None:
    done = worker("stack", LANYARD_DEPLOYMENT="No Good")
    assert done.returncode == 2
    assert "LANYARD_DEPLOYMENT" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_setup_without_a_deployment_says_which_setting_is_missing() -> None:
    done = worker("setup", TEMPORAL_ADDRESS="127.0.0.1:9")
    assert done.returncode == 2
    assert "LANYARD_DEPLOYMENT is not set" in done.stderr


def test_a_demo_without_its_file_says_how_to_name_one() -> None:
    done = worker("demo", "--run", "/nowhere/run.json")
    assert done.returncode == 1
    assert "make demo RUN=" in done.stderr
