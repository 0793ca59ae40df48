"""Every optimizer step is in the journal exactly once, and its numbers are what they say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainer import synthetic
from trainer.hashing import model_sha256, momentum_sha256
from trainer.journal import Interval, Journal

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


def entry(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, **more}


def test_steps_are_taken_in_order_and_once() -> None:
    journal = Journal()
    journal.extend(entry(step) for step in (1, 2, 3))
    journal.extend([])
    journal.extend([entry(4)])
    assert [each["step"] for each in journal.entries] == [1, 2, 3, 4]
    assert journal.last_step == 4


@pytest.mark.parametrize("steps", [[1], [2], [4], [3, 3], [3, 5]])
def test_a_step_that_is_not_the_next_is_refused_and_nothing_is_lost(steps: list[int]) -> None:
    journal = Journal([entry(1), entry(2)])
    with pytest.raises(ValueError, match="belongs"):
        journal.extend(entry(step) for step in steps)
    assert journal.last_step == 2


def run(
    first: int, last: int, model: torch.nn.Module, optimizer: torch.optim.SGD, attempt: int
) -> list[dict[str, Any]]:
    """Steps first..last of one rank, as the training does them."""
    samples = synthetic.shard(RECIPE, 0, 1)
    parameters = list(model.parameters())
    interval = Interval(parameters, torch.device("cpu"))
    interval.open()
    entries: list[dict[str, Any]] = []
    for step in range(first, last + 1):
        inputs, targets = synthetic.batch(RECIPE, samples, 0, step)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        interval.after_step(loss, [parameter.grad for parameter in parameters if parameter.grad is not None])
        if step % RECIPE["checkpoint_interval"] == 0 or step == last:
            entries += interval.close(last_step=step, learning_rate=0.05, batch=16, world_size=1, attempt=attempt)
            interval.open()
    return entries


def fresh() -> tuple[torch.nn.Module, torch.optim.SGD]:
    model = synthetic.build_model(RECIPE)
    return model, synthetic.build_optimizer(RECIPE, model)


def test_numbers_are_those_of_the_step() -> None:
    model, optimizer = fresh()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    (only,) = run(1, 1, model, optimizer, attempt=2)
    change = torch.cat([(new - old).flatten() for new, old in zip(model.parameters(), before, strict=True)])
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    assert only["parameter_change"] == pytest.approx(change.norm().item(), rel=1e-6)
    assert only["gradient_norm"] == pytest.approx(gradient.norm().item(), rel=1e-6)
    assert only["attempt"] == 2
    assert only["learning_rate"] == 0.05
    assert set(only) == {
        "step",
        "loss",
        "gradient_norm",
        "parameter_change",
        "learning_rate",
        "samples_per_second",
        "attempt",
    }


def test_every_value_is_finite_and_positive_and_every_step_there() -> None:
    entries = run(1, 12, *fresh(), attempt=1)
    assert [each["step"] for each in entries] == list(range(1, 13))
    for each in entries:
        assert all(math.isfinite(each[key]) and each[key] > 0 for key in each)


def test_a_run_cut_anywhere_and_replayed_from_its_last_commit_has_each_step_once_and_the_same_parameters() -> None:
    whole_model, whole_optimizer = fresh()
    whole = run(1, 12, whole_model, whole_optimizer, attempt=1)
    for killed_after in range(1, 12):
        committed = killed_after // 4 * 4
        model, optimizer = fresh()
        journal = Journal(run(1, committed, model, optimizer, attempt=1) if committed else [])
        state = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "optimizer": optimizer.state_dict()}
        second_model, second_optimizer = fresh()
        second_model.load_state_dict(state["model"])
        second_optimizer.load_state_dict(state["optimizer"])
        journal.extend(run(committed + 1, 12, second_model, second_optimizer, attempt=2))
        assert [each["step"] for each in journal.entries] == list(range(1, 13))
        assert [each["loss"] for each in journal.entries] == [each["loss"] for each in whole]
        assert model_sha256(second_model.state_dict()) == model_sha256(whole_model.state_dict())
        assert momentum_sha256(second_optimizer.state_dict()) == momentum_sha256(whole_optimizer.state_dict())


def test_batches_of_steps_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers() -> list[tuple[float, float, float]]:
        entries = run(1, 12, *fresh(), attempt=1)
        return [(each["loss"], each["gradient_norm"], each["parameter_change"]) for each in entries]

    at_once = numbers()
    for kept in (1, 3, 4):
        monkeypatch.setattr("trainer.journal.MOST_STEPS_KEPT", kept)
        assert numbers() == at_once
