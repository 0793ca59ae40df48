"""The training function each rank runs: restore, step, journal, report at checkpoint boundaries, hold for a drill.

The parameters after step n are a function of the recipe alone: a step's samples and their noise depend on its number,
restored state is complete (model, momentum), and nothing is kept in the process that a kill could lose.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from ray.train import Checkpoint
from torch.nn.parallel import DistributedDataParallel

from trainer import checkpoints, synthetic
from trainer.attempt import Attempt
from trainer.checkpoints import Restored
from trainer.hashing import model_sha256, momentum_sha256
from trainer.job import Job, parse
from trainer.journal import Interval, Journal


def train(config: dict[str, Any]) -> None:
    """Run one rank of one attempt; ``config["order"]`` is the text of LANYARD_JOB.

    Raises PinError, CheckpointDamaged, CheckpointForeign, StorageError; Ray Train counts each against the run's
    failure limit.
    """
    job = parse(config["order"])

    def restore(checkpoint: Checkpoint) -> Restored:
        restored = checkpoints.load(checkpoint.filesystem, checkpoint.path)
        checkpoints.must_match(restored, job.recipe.mapping(), job.world_size)
        return restored

    with Attempt.begin(job, restore) as attempt:
        restored = attempt.restored
        model = synthetic.build_model(job.recipe.mapping()).to(attempt.device)
        if restored is not None:
            model.load_state_dict(restored.model)
        optimizer = synthetic.build_optimizer(job.recipe.mapping(), model)
        if restored is not None:
            optimizer.load_state_dict(restored.optimizer)
        start = 0 if restored is None else restored.step
        attempt.start(start, model_sha256(model.state_dict()), momentum_sha256(optimizer.state_dict()))
        _steps(job, model, optimizer, start, Journal(_inherited(restored, attempt.restored_from)), attempt)
        attempt.final(model_sha256(model.state_dict()), momentum_sha256(optimizer.state_dict()))


def _steps(
    job: Job,
    model: torch.nn.Module,
    optimizer: torch.optim.SGD,
    start: int,
    journal: Journal,
    attempt: Attempt[Restored],
) -> None:
    """Optimizer steps start+1..steps, with a report at each boundary and after the last."""
    recipe, device = job.recipe.mapping(), attempt.device
    if start >= job.steps:
        return
    samples = tuple(part.to(device) for part in synthetic.shard(recipe, attempt.rank, job.world_size))
    replicated = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    interval = Interval(parameters, device)
    interval.open()
    mean_squared_error = torch.nn.functional.mse_loss
    for step in range(start + 1, job.steps + 1):
        inputs, targets = synthetic.batch(recipe, samples, attempt.rank, step)
        loss = mean_squared_error(replicated(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        interval.after_step(loss, [parameter.grad for parameter in parameters if parameter.grad is not None])
        attempt.stepped(step)
        if job.is_boundary(step):
            journal.extend(
                interval.close(
                    last_step=step,
                    learning_rate=job.recipe.learning_rate,
                    batch=job.recipe.batch_size,
                    world_size=job.world_size,
                    attempt=attempt.number,
                )
            )
            latest = journal.entries[-1]
            write = partial(_write, job=job, step=step, model=model, optimizer=optimizer, journal=journal)
            attempt.report(
                step,
                latest["loss"],
                write,
                samples_per_second=latest["samples_per_second"],
                model_sha256=model_sha256(model.state_dict()),
                momentum_sha256=momentum_sha256(optimizer.state_dict()),
            )
            interval.open()


def _write(
    directory: Path, job: Job, step: int, model: torch.nn.Module, optimizer: torch.optim.SGD, journal: Journal
) -> None:
    checkpoints.write(
        directory,
        step=step,
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        steps=journal.entries,
        recipe=job.recipe.mapping(),
        world_size=job.world_size,
    )


def _inherited(restored: Restored | None, source: str | None) -> list[dict[str, Any]]:
    """The journal restored. Steps of an earlier run carry attempt 0: attempts are numbered within a run."""
    if restored is None:
        return []
    if source is not None and source.startswith("s3://"):
        return [{**entry, "attempt": 0} for entry in restored.steps]
    return [dict(entry) for entry in restored.steps]
