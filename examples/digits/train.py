"""Handwritten digits, learned by a two-layer network over all ranks, to the same end whether one is killed or not."""

from __future__ import annotations

import io
import json
import sys
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from trainer import workload

SEED = 7
PIXELS, HIDDEN, DIGITS = 64, 64, 10
BATCH = 128  # over all ranks together: the training is the same however many share it


class Samples(NamedTuple):
    """Images, one a row, and the digits that they show."""

    images: torch.Tensor
    digits: torch.Tensor


def load_samples() -> tuple[Samples, Samples]:
    """The data set that comes with scikit-learn, split the same way everywhere: to learn from, and held out."""
    images, digits = load_digits(return_X_y=True)
    images = torch.from_numpy((images / 16).astype(np.float32))  # pixels are 0 to 16
    rows = np.arange(len(digits))
    learn, held_out = train_test_split(rows, test_size=0.2, stratify=digits, random_state=SEED)
    digits = torch.from_numpy(digits)
    return Samples(images[learn], digits[learn]), Samples(images[held_out], digits[held_out])


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Model and optimizer as they are before the first step, equal on all ranks."""
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(PIXELS, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, DIGITS))
    return model, torch.optim.Adam(model.parameters(), lr=0.003)


def batch(samples: Samples, step: int, rank: int, world_size: int) -> Samples:
    """A rank's share of a step's samples.

    Steps walk through the data in an order that each epoch shuffles anew. The order follows from the step's number
    alone, not from an iterator that a killed process takes with it: a step made again sees the same samples.
    """
    epoch, place = divmod(step - 1, len(samples.digits) // BATCH)  # what is left over waits for another shuffle
    shuffled = torch.randperm(len(samples.digits), generator=torch.Generator().manual_seed(SEED + epoch))
    mine = shuffled[place * BATCH : (place + 1) * BATCH][rank::world_size]
    return Samples(samples.images[mine], samples.digits[mine])


@torch.no_grad()
def accuracy(model: torch.nn.Module, samples: Samples) -> float:
    """The share of the samples that the model names rightly."""
    return (model(samples.images).argmax(dim=1) == samples.digits).float().mean().item()


def train() -> None:
    """One rank of one attempt."""
    torch.set_num_threads(1)  # sums are then rounded alike on hosts with more or fewer cores
    order = workload.load_order()
    with workload.Attempt.begin(order, workload.load_state) as attempt:
        samples, held_out = (Samples(*(part.to(attempt.device) for part in each)) for each in load_samples())
        model, optimizer = build()
        model.to(attempt.device)
        start = 0
        if attempt.restored is not None:
            start = attempt.restored["step"]
            model.load_state_dict(attempt.restored["model"])
            optimizer.load_state_dict(attempt.restored["optimizer"])

        def hashes() -> tuple[str, str]:
            return workload.model_sha256(model.state_dict()), workload.optimizer_sha256(optimizer.state_dict())

        attempt.start(start, *hashes())
        replicated = DistributedDataParallel(model)
        for step in range(start + 1, order.steps + 1):
            mine = batch(samples, step, attempt.rank, attempt.world_size)
            loss = cross_entropy(replicated(mine.images), mine.digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            attempt.stepped(step)
            if order.is_boundary(step):
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                # Nothing here draws random numbers after the start; with dropout, say, their state belongs in here too.
                state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                model_hash, optimizer_hash = hashes()
                attempt.report(
                    step,
                    mean.item() / attempt.world_size,
                    partial(workload.save_state, state=state),
                    held_out_accuracy=accuracy(model, held_out),
                    model_sha256=model_hash,
                    momentum_sha256=optimizer_hash,
                )
        attempt.final(*hashes())


def main() -> None:
    """The driver: train, evaluate what the last checkpoint holds, export it."""
    order = workload.load_order()
    workload.prepare(order)
    trainer = TorchTrainer(
        train,
        torch_config=workload.torch_config(order),
        scaling_config=workload.scaling_config(order),
        run_config=workload.run_config(order),
    )
    result = trainer.fit()

    # From the checkpoint, not from what a worker said: this also shows that it loads.
    state = workload.load_state(result.checkpoint)
    model, _ = build()
    model.load_state_dict(state["model"])
    samples, held_out = load_samples()
    evaluation = {
        "step": state["step"],
        "held_out_samples": len(held_out.digits),
        "held_out_accuracy": accuracy(model, held_out),
        "train_accuracy": accuracy(model, samples),
    }
    stored = io.BytesIO()
    torch.save(state["model"], stored)
    files = {"model.pt": stored.getvalue(), "evaluation.json": json.dumps(evaluation, indent=2).encode()}
    place = workload.publish_exports(order, result, files)
    sys.stdout.write(f"held-out accuracy {evaluation['held_out_accuracy']:.3f}; exported to {place}\n")


if __name__ == "__main__":
    main()
