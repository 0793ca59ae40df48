"""One small run, trained once for all tests, and a copy of it for each."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.trainer.small_run import (
    RUN_KEY,
    SmallRun,
    train,
)


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return train(tmp_path_factory.mktemp("sound") / RUN_KEY)


@pytest.fixture
def run(sound: SmallRun, tmp_path: Path) -> SmallRun:
    shutil.copytree(sound.root, tmp_path / RUN_KEY)
    return SmallRun(tmp_path / RUN_KEY)
