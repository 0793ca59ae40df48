"""A checkpoint loads whole or is refused with what is wrong; another training's is told from damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
import torch

from trainer import checkpoints, synthetic
from trainer.checkpoints import CheckpointDamaged, CheckpointForeign
from trainer.hashing import model_sha256, momentum_sha256

RECIPE: dict[str, Any] = {
    "steps": 12,
    "samples_per_rank": 40,
    "checkpoint_interval": 4,
    "learning_rate": 0.05,
    "momentum": 0.9,
    "features": 5,
    "batch_size": 16,
    "seed": 3,
}
LOCAL = pafs.LocalFileSystem()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint_step-000000004_attempt-001"
    directory.mkdir()
    model = synthetic.build_model(RECIPE)
    optimizer = synthetic.build_optimizer(RECIPE, model)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    checkpoints.write(
        directory,
        step=4,
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        steps=[{"step": step, "loss": 1.0 / step} for step in range(1, 5)],
        recipe=RECIPE,
        world_size=2,
    )
    return directory


def journal_with(place: Path, **changes: Any) -> None:
    path = place / checkpoints.JOURNAL
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_was_written_is_restored_bit_for_bit(place: Path) -> None:
    restored = checkpoints.load(LOCAL, str(place))
    assert (restored.name, restored.step, restored.world_size) == (place.name, 4, 2)
    assert [entry["step"] for entry in restored.steps] == [1, 2, 3, 4]
    state = torch.load(place / checkpoints.STATE, weights_only=True)
    assert model_sha256(restored.model) == model_sha256(state["model"])
    assert momentum_sha256(restored.optimizer) == momentum_sha256(state["optimizer"])


@pytest.mark.parametrize("file", [checkpoints.STATE, checkpoints.JOURNAL])
def test_a_missing_file_is_named(place: Path, file: str) -> None:
    (place / file).unlink()
    with pytest.raises(CheckpointDamaged, match=f"checkpoint damaged: {place.name} has no {file}"):
        checkpoints.load(LOCAL, str(place))


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_truncated_state_is_said_to_be(place: Path, keep: int) -> None:
    path = place / checkpoints.STATE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointDamaged, match="truncated or altered"):
        checkpoints.load(LOCAL, str(place))


def test_one_flipped_bit_is_noticed(place: Path) -> None:
    path = place / checkpoints.STATE
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointDamaged, match="truncated or altered"):
        checkpoints.load(LOCAL, str(place))


def test_a_truncated_journal_is_said_to_be(place: Path) -> None:
    path = place / checkpoints.JOURNAL
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointDamaged, match=r"journal\.json is no journal"):
        checkpoints.load(LOCAL, str(place))


@pytest.mark.parametrize("steps", [[1, 2, 3], [1, 2, 3, 3], [1, 2, 4, 3], [1, 2, 3, 4, 5], []])
def test_a_journal_without_each_step_once_is_refused(place: Path, steps: list[int]) -> None:
    journal_with(place, steps=[{"step": step} for step in steps])
    with pytest.raises(CheckpointDamaged, match="each of the steps"):
        checkpoints.load(LOCAL, str(place))


@pytest.mark.parametrize("changes", [{"schema": 2}, {"recipe": None}, {"world_size": "2"}, {"checkpoint_sha256": 0}])
def test_a_journal_of_another_kind_is_refused(place: Path, changes: dict[str, Any]) -> None:
    journal_with(place, **changes)
    with pytest.raises(CheckpointDamaged, match="schema 1"):
        checkpoints.load(LOCAL, str(place))


def test_more_steps_and_another_interval_are_the_same_training(place: Path) -> None:
    restored = checkpoints.load(LOCAL, str(place))
    checkpoints.must_match(restored, {**RECIPE, "steps": 400, "checkpoint_interval": 7}, 2)


@pytest.mark.parametrize("key", ["samples_per_rank", "learning_rate", "momentum", "features", "batch_size", "seed"])
def test_another_recipe_is_refused_by_name(place: Path, key: str) -> None:
    restored = checkpoints.load(LOCAL, str(place))
    with pytest.raises(CheckpointForeign, match=key):
        checkpoints.must_match(restored, {**RECIPE, key: RECIPE[key] + 0.01}, 2)


def test_another_world_size_and_a_past_end_are_refused(place: Path) -> None:
    restored = checkpoints.load(LOCAL, str(place))
    with pytest.raises(CheckpointForeign, match="world size"):
        checkpoints.must_match(restored, RECIPE, 3)
    with pytest.raises(CheckpointForeign, match=r"raise workload\.recipe\.steps"):
        checkpoints.must_match(restored, {**RECIPE, "steps": 3}, 2)
