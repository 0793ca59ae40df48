"""The synthetic regression: a function of recipe, rank and step alone, and no two steps of it leave the same state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainer import synthetic
from trainer.hashing import model_sha256, momentum_sha256

RECIPE: dict[str, Any] = {
    "samples_per_rank": 1024,
    "learning_rate": 0.1,
    "momentum": 0.9,
    "features": 16,
    "batch_size": 128,
    "seed": 7,
}
STEPS = 5000

# Samples that come round again are what a training could run into a cycle on: after eight steps, two, or one.
RECIPES: dict[str, dict[str, Any]] = {
    "as run.json has it": {},
    "few samples": {"samples_per_rank": 16, "batch_size": 8},
    "the whole shard each step": {"samples_per_rank": 16, "batch_size": 16, "features": 1},
    "one sample": {"samples_per_rank": 1, "batch_size": 1, "learning_rate": 0.01},
}


@pytest.mark.parametrize("change", RECIPES.values(), ids=RECIPES.keys())
def test_no_two_steps_of_a_long_training_leave_the_same_parameters(change: dict[str, Any]) -> None:
    recipe = {**RECIPE, **change}
    samples = synthetic.shard(recipe, 0, 1)
    model = synthetic.build_model(recipe)
    optimizer = synthetic.build_optimizer(recipe, model)
    models, momenta, losses = set(), set(), []
    for step in range(1, STEPS + 1):
        inputs, targets = synthetic.batch(recipe, samples, 0, step)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        models.add(model_sha256(model.state_dict()))
        momenta.add(momentum_sha256(optimizer.state_dict()))
    assert (len(models), len(momenta)) == (STEPS, STEPS)
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert sorted(losses[-STEPS // 4 :])[STEPS // 8] < losses[0]


def test_a_batch_follows_from_rank_and_step_alone() -> None:
    def batch(rank: int, step: int, **change: Any) -> bytes:
        recipe = {**RECIPE, **change}
        inputs, targets = synthetic.batch(recipe, synthetic.shard(recipe, rank, 2), rank, step)
        assert (inputs.dtype, targets.shape) == (torch.float32, (recipe["batch_size"], 1))
        return bytes(torch.cat([inputs, targets], dim=1).numpy().tobytes())

    first = [batch(0, step) for step in range(1, 20)]
    assert [batch(0, step) for step in range(19, 0, -1)][::-1] == first
    # Step 9 meets the samples of step 1 again, and is another batch all the same.
    assert len({*first, *(batch(1, step) for step in range(1, 20)), batch(0, 1, seed=8)}) == 39


def test_the_noise_of_each_step_is_as_large_as_it_is_said_to_be() -> None:
    inputs, exact = synthetic.shard(RECIPE, 0, 1)
    noise = torch.cat([synthetic.batch(RECIPE, (inputs, exact), 0, step)[1] for step in range(1, 9)]) - exact
    assert noise.std().item() == pytest.approx(synthetic.NOISE, rel=0.1)
    assert noise.mean().item() == pytest.approx(0.0, abs=0.02)
