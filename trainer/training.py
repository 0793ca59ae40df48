"""The training function each rank runs: restore, step, journal, report at checkpoint boundaries, hold for a drill.

The parameters after step n are a function of the recipe alone: data order depends on the step, restored state is
complete (model, momentum), and nothing is kept in the process that a kill could lose.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConsistencyMode
from torch.nn.parallel import DistributedDataParallel

from trainer import checkpoints, evidence, pins, standby, storage, synthetic
from trainer.checkpoints import CheckpointDamaged, Restored
from trainer.hashing import model_sha256, momentum_sha256
from trainer.job import Job, parse, storage_path
from trainer.journal import Interval, Journal

# How long one wait for the controller's word lasts before the hold looks again.
COMMIT_POLL_S = 20.0


def train(config: dict[str, Any]) -> None:
    """Run one rank of one attempt; ``config["order"]`` is the text of LANYARD_JOB.

    Raises PinError, CheckpointDamaged, CheckpointForeign, StorageError; Ray Train counts each against the run's
    failure limit.
    """
    job = parse(config["order"])
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    pins.enforce(job.pins, job.device, f"rank {rank}")
    if world_size != job.world_size:
        raise RuntimeError(f"{world_size} ranks were started, {job.world_size} were asked for")
    device = ray.train.torch.get_device() if job.device == "cuda" else torch.device("cpu")
    store = storage.filesystem()
    root = storage_path("storage", job.storage)[1]
    attempt, restored, source = _agree(job, store, root, rank, device)

    recipe = job.recipe.mapping()
    model = synthetic.build_model(recipe).to(device)
    if restored is not None:
        model.load_state_dict(restored.model)
    optimizer = synthetic.build_optimizer(recipe, model)
    if restored is not None:
        optimizer.load_state_dict(restored.optimizer)
    start = 0 if restored is None else restored.step

    recorder = evidence.Recorder(store, root, job, attempt, rank)
    recorder.start(job, _start_facts(job, context, device, start, source, model, optimizer))
    journal = Journal(_inherited(restored, source))
    try:
        _steps(job, model, optimizer, start, journal, recorder, attempt, rank, device)
        recorder.final(job.recipe.steps, model_sha256(model.state_dict()), momentum_sha256(optimizer.state_dict()))
    finally:
        recorder.close()


def _steps(
    job: Job,
    model: torch.nn.Module,
    optimizer: torch.optim.SGD,
    start: int,
    journal: Journal,
    recorder: evidence.Recorder,
    attempt: int,
    rank: int,
    device: torch.device,
) -> None:
    """Optimizer steps start+1..steps, with a report at each boundary and after the last."""
    recipe = job.recipe.mapping()
    steps, every = job.recipe.steps, job.recipe.checkpoint_interval
    if start >= steps:
        return
    samples = tuple(part.to(device) for part in synthetic.shard(recipe, rank, job.world_size))
    replicated = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    interval = Interval(parameters, device)
    interval.open()
    first_boundary = True
    mean_squared_error = torch.nn.functional.mse_loss
    for step in range(start + 1, steps + 1):
        inputs, targets = synthetic.batch(recipe, samples, step)
        loss = mean_squared_error(replicated(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        interval.after_step(loss, [parameter.grad for parameter in parameters if parameter.grad is not None])
        if step == start + 1:
            recorder.first_step(step)
        if step % every == 0 or step == steps:
            journal.extend(
                interval.close(
                    last_step=step,
                    learning_rate=job.recipe.learning_rate,
                    batch=job.recipe.batch_size,
                    world_size=job.world_size,
                    attempt=attempt,
                )
            )
            # Whoever watches for a commit must find who made it.
            recorder.settle()
            name = _report(job, step, model, optimizer, journal, attempt, rank)
            if first_boundary:
                # Not earlier: its imports would compete with this attempt's own start.
                standby.keep_one_ready()
                first_boundary = False
            if job.drill is not None and step == job.drill.after_step and start < job.drill.after_step:
                _hold(name, job.drill.hold_s)
            interval.open()


def _report(
    job: Job,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.SGD,
    journal: Journal,
    attempt: int,
    rank: int,
) -> str:
    """Report step ``step`` on every rank alike; rank 0 alone uploads. Returns the checkpoint's directory name."""
    # Unique per attempt: a replayed step never writes over bytes that may be committed.
    name = f"checkpoint_step-{step:09d}_attempt-{attempt:03d}"
    latest = journal.entries[-1]
    metrics = {key: latest[key] for key in ("step", "loss", "samples_per_second")} | {
        "attempt": attempt,
        "steps": job.recipe.steps,
    }
    if rank != 0:
        ray.train.report(metrics, checkpoint=None, checkpoint_dir_name=name)
        return name
    with tempfile.TemporaryDirectory(prefix="lanyard-checkpoint-") as directory:
        checkpoints.write(
            Path(directory),
            step=step,
            model=model.state_dict(),
            optimizer=optimizer.state_dict(),
            steps=journal.entries,
            recipe=job.recipe.mapping(),
            world_size=job.world_size,
        )
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(directory), checkpoint_dir_name=name)
    return name


def _hold(name: str, hold_s: float) -> None:
    """Wait for the drill's SIGKILL, at most ``hold_s`` seconds from the report, once ``name`` is committed.

    A hold that nobody ends goes on training: the drill then fails honestly, and the training does not.
    """
    ends = time.monotonic() + hold_s
    committed = False
    while not committed and (left := ends - time.monotonic()) > 0:
        reported = ray.train.get_all_reported_checkpoints(
            consistency_mode=CheckpointConsistencyMode.COMMITTED, timeout_s=min(left, COMMIT_POLL_S)
        )
        # The call returns its list on time-out too: only the name in it says that the commit happened.
        committed = any(entry.checkpoint.path.rstrip("/").endswith("/" + name) for entry in reported)
        if not committed:
            time.sleep(min(0.1, max(0.0, ends - time.monotonic())))
    print(f"drill: {name} is {'committed' if committed else 'NOT committed'}; holding for the kill", flush=True)
    time.sleep(max(0.0, ends - time.monotonic()))
    print("drill: nobody killed this rank; training goes on", flush=True)


def _agree(
    job: Job, store: pafs.FileSystem, root: str, rank: int, device: torch.device
) -> tuple[int, Restored | None, str | None]:
    """What all ranks do alike: the attempt's number, the state restored, and what ``restored_from`` says of it.

    Rank 0 chooses and the others load exactly that: ranks that each chose for themselves could train apart.
    """
    choice: list[Any] = [None]
    restored = None
    if rank == 0:
        try:
            restored, place, source = _choose(job, store, root)
            choice[0] = (evidence.next_attempt(store, root, job.train_name), place, source, None)
        except Exception as error:
            choice[0] = (0, None, None, f"{type(error).__name__}: {error}")
            if job.world_size > 1:
                _broadcast(choice, device)
            raise
    if job.world_size > 1:
        _broadcast(choice, device)
    attempt, place, source, problem = choice[0]
    if problem is not None:
        raise RuntimeError(f"rank 0 could not start: {problem}")
    if rank != 0 and place is not None:
        restored = checkpoints.load(store, place)
    return attempt, restored, source


def _broadcast(choice: list[Any], device: torch.device) -> None:
    dist.broadcast_object_list(choice, src=0, device=device if device.type == "cuda" else None)


def _choose(job: Job, store: pafs.FileSystem, root: str) -> tuple[Restored | None, str | None, str | None]:
    """The state to start from, its place in storage, and what the evidence calls it."""
    recipe = job.recipe.mapping()
    latest = ray.train.get_checkpoint()
    if latest is not None:
        restored, place = _last_that_loads(store, latest)
        checkpoints.must_match(restored, recipe, job.world_size)
        return restored, place, restored.name
    if job.resume is not None:
        place = storage_path("resume.checkpoint", job.resume)[1]
        restored = checkpoints.load(store, place)
        checkpoints.must_match(restored, recipe, job.world_size)
        return restored, place, job.resume
    return None, None, None


def _last_that_loads(store: pafs.FileSystem, latest: Checkpoint) -> tuple[Restored, str]:
    """The run's own last commit that loads, the latest first. Raises CheckpointDamaged when none does."""
    try:
        return checkpoints.load(store, latest.path), latest.path
    except CheckpointDamaged as error:
        problems = [str(error)]
    reported = ray.train.get_all_reported_checkpoints(
        consistency_mode=CheckpointConsistencyMode.COMMITTED, timeout_s=COMMIT_POLL_S
    )
    for entry in reversed(reported):
        path = entry.checkpoint.path
        if path == latest.path:
            continue
        try:
            restored = checkpoints.load(store, path)
        except CheckpointDamaged as error:
            problems.append(str(error))
            continue
        print(f"{'; '.join(problems)}; going back to {restored.name} (step {restored.step})", flush=True)
        return restored, path
    raise CheckpointDamaged(f"no commit of this run loads: {'; '.join(problems)}")


def _inherited(restored: Restored | None, source: str | None) -> list[dict[str, Any]]:
    """The journal restored. Steps of an earlier run carry attempt 0: attempts are numbered within a run."""
    if restored is None:
        return []
    if source is not None and source.startswith("s3://"):
        return [{**entry, "attempt": 0} for entry in restored.steps]
    return [dict(entry) for entry in restored.steps]


def _start_facts(
    job: Job,
    context: Any,
    device: torch.device,
    start: int,
    source: str | None,
    model: torch.nn.Module,
    optimizer: torch.optim.SGD,
) -> dict[str, Any]:
    node_id = ray.get_runtime_context().get_node_id()
    return {
        "world_size": job.world_size,
        "local_rank": context.get_local_rank(),
        "device": evidence.device_facts(device, node_id),
        "ray": {"node_id": node_id, "address": ray.util.get_node_ip_address()},
        "restored_step": start,
        "restored_from": source,
        "model_sha256": model_sha256(model.state_dict()),
        "momentum_sha256": momentum_sha256(optimizer.state_dict()),
    }
