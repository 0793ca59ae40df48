"""The training loop without Ray and without a journal, for `torchrun`: same data, model, optimizer and DDP over gloo.

    torchrun --nproc-per-node 2 bench/bare_loop.py STEPS INTERVAL RECIPE-JSON

Rank 0 prints one JSON line: steps per second of each interval (time between two barriers), and the loss of the last
step, reduced over ranks as the journal has it, which shows that it was the same training. Runs in the application's
Python with the checkout on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainer import synthetic


def main() -> None:
    """Train, and tell."""
    steps, interval, recipe = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    samples = synthetic.shard(recipe, rank, world_size)
    model = synthetic.build_model(recipe)
    optimizer = synthetic.build_optimizer(recipe, model)
    replicated = DistributedDataParallel(model)
    rates = []
    loss = torch.zeros(())
    dist.barrier()
    began = time.perf_counter()
    for step in range(1, steps + 1):
        inputs, targets = synthetic.batch(recipe, samples, rank, step)
        loss = torch.nn.functional.mse_loss(replicated(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % interval == 0:
            rates.append(interval / (time.perf_counter() - began))
            dist.barrier()
            began = time.perf_counter()
    total = loss.detach().double()
    dist.all_reduce(total)
    if rank == 0:
        print(json.dumps({"rates": rates, "loss": float(total) / world_size}), flush=True)
    # A rank that closes its sockets while the other still reads makes that one abort in gloo (seen: SIGABRT).
    dist.barrier()
    time.sleep(1.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
