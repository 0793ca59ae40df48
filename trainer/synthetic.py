"""The synthetic regression: its data, its model and its optimizer, as pure functions of the recipe.

Training and inspection both build from here, so that a checkpoint read from storage weeks later meets the
very same held-out samples. Nothing depends on the device, the process or the number of ranks: every tensor
comes from its own seeded generator on the CPU. A recipe is the mapping ``workload.recipe`` of run.json; read
here are ``features``, ``samples_per_rank``, ``batch_size``, ``learning_rate``, ``momentum`` and ``seed``.

Targets are ``x @ w + b + noise`` with ``x, w, b ~ N(0, 1)`` and noise of standard deviation 0.1, so a fitted
model's mean squared error nears 0.01 and never reaches zero. Each training step draws its noise anew: with
samples that repeat, a fitted model runs into an exact cycle of parameters, and two of its commits would have
the same hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

HELD_OUT_SAMPLES = 4096
NOISE = 0.1


def shard(recipe: Mapping[str, Any], rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's training samples: inputs ``[samples_per_rank, features]`` and targets before noise
    ``[samples_per_rank, 1]``, float32 on the CPU.

    Shards of different ranks are disjoint draws; rank r's is the same for every world size that has such a
    rank. Raises ValueError for a rank outside ``0..world_size-1``.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} does not exist in a world of {world_size}")
    inputs, targets = _samples(recipe, _generator(recipe, f"shard/{rank}"), int(recipe["samples_per_rank"]))
    return inputs.float(), targets.float()


def batch(
    recipe: Mapping[str, Any], samples: tuple[torch.Tensor, torch.Tensor], rank: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's batch of optimizer step ``step`` (1, 2, ...): ``batch_size`` consecutive samples of its shard,
    wrapping round, with that step's noise on the targets.

    A function of rank and step alone, so a restored rank goes on with the batch it would have had.
    """
    inputs, targets = samples
    count = int(recipe["batch_size"])
    rows = (torch.arange((step - 1) * count, step * count) % inputs.shape[0]).to(inputs.device)
    noise = _noise(_generator(recipe, f"noise/{rank}/{step}"), count).float().to(inputs.device)
    return inputs[rows], targets[rows] + noise


def held_out(recipe: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples no rank trains on: inputs ``[4096, features]`` and targets ``[4096, 1]``, float64 on the
    CPU.
    """
    generator = _generator(recipe, "held-out")
    inputs, targets = _samples(recipe, generator, HELD_OUT_SAMPLES)
    return inputs, targets + _noise(generator, HELD_OUT_SAMPLES)


def held_out_loss(recipe: Mapping[str, Any], model: torch.nn.Module) -> float:
    """Mean squared error on the held-out samples.

    Always in float64 on the CPU, with the parameters copied there, so the figure does not depend on where the
    model was trained (two machines agree to about 1e-12 of it).
    """
    twin = build_model(recipe).double()
    twin.load_state_dict({name: value.detach().to("cpu") for name, value in model.state_dict().items()})
    inputs, targets = held_out(recipe)
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(twin(inputs), targets).item())


def build_model(recipe: Mapping[str, Any]) -> torch.nn.Linear:
    """The untrained model, float32 on the CPU, with the same initial parameters on every rank."""
    model = torch.nn.Linear(int(recipe["features"]), 1)
    generator = _generator(recipe, "initial")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model


def build_optimizer(recipe: Mapping[str, Any], model: torch.nn.Module) -> torch.optim.SGD:
    """SGD with the recipe's learning rate and momentum over all of the model's parameters."""
    return torch.optim.SGD(model.parameters(), lr=float(recipe["learning_rate"]), momentum=float(recipe["momentum"]))


def _samples(recipe: Mapping[str, Any], generator: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and their targets before noise."""
    features = int(recipe["features"])
    truth = torch.randn(features + 1, 1, generator=_generator(recipe, "truth"), dtype=torch.float64)
    inputs = torch.randn(count, features, generator=generator, dtype=torch.float64)
    return inputs, inputs @ truth[:features] + truth[features]


def _noise(generator: torch.Generator, count: int) -> torch.Tensor:
    return torch.randn(count, 1, generator=generator, dtype=torch.float64) * NOISE


def _generator(recipe: Mapping[str, Any], purpose: str) -> torch.Generator:
    # A digest keeps the streams of neighbouring seeds and purposes apart.
    digest = hashlib.sha256(f"lanyard/{int(recipe['seed'])}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
