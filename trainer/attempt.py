"""One rank's part in one attempt: restore, evidence, reports, the drill's hold. Any workload, Train V2 with torch.

An attempt is one start of the whole worker group. Everything here that involves other ranks is called by all of them
alike, and needs the process group that TorchTrainer sets up.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import pyarrow.fs as pafs
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConsistencyMode

from trainer import evidence, pins, standby, storage
from trainer.checkpoints import CheckpointDamaged
from trainer.job import Order, storage_path

State = TypeVar("State")

# How long one wait for the controller's word lasts before the hold looks again.
COMMIT_POLL_S = 20.0
# About three times what the imports take on two busy cores.
STANDBY_WAIT_S = 20.0


class Attempt(Generic[State]):
    """What a rank is in this attempt. Made by ``begin``; a context manager, so that its evidence is stored at the end.

    ``number`` counts the attempts of this training from 1; ``restored`` is what ``restore`` made of a checkpoint, None
    for a fresh start; ``restored_from`` is what the evidence calls that checkpoint.
    """

    def __init__(
        self, order: Order, store: pafs.FileSystem, number: int, restored: State | None, restored_from: str | None
    ) -> None:
        context = ray.train.get_context()
        self.order = order
        self.number = number
        self.rank: int = context.get_world_rank()
        self.world_size: int = context.get_world_size()
        self.device = _device(order)
        self.restored = restored
        self.restored_from = restored_from
        self._local_rank: int = context.get_local_rank()
        self._recorder = evidence.Recorder(store, order.root, order, number, self.rank)
        self._start: int | None = None
        self._has_spare = False

    @classmethod
    def begin(cls, order: Order, restore: Callable[[Checkpoint], State]) -> Attempt[State]:
        """Check this worker, and agree with all ranks on the attempt's number and on the checkpoint to restore.

        The checkpoint is this run's last commit that loads, else the one that the order resumes from, else none.
        ``restore`` loads one, and raises CheckpointDamaged where it cannot: then the commit before is tried. What else
        it raises ends the attempt. Raises PinError, CheckpointDamaged, StorageError, RuntimeError; Ray Train counts
        each against the run's failure limit.
        """
        context = ray.train.get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
        pins.enforce(order.pins, order.device, f"rank {rank}")
        if world_size != order.world_size:
            raise RuntimeError(f"{world_size} ranks were started, {order.world_size} were asked for")
        store = storage.filesystem()
        number, restored, source = _agree(order, store, restore, rank)
        return cls(order, store, number, restored, source)

    def start(self, step: int, model_sha256: str, momentum_sha256: str) -> None:
        """Record who starts where and from what: ``step`` is the step restored (0 for a fresh start), and the hashes
        are of the state that training goes on with."""
        self._start = step
        node_id = ray.get_runtime_context().get_node_id()
        self._recorder.start(
            {
                "world_size": self.world_size,
                "local_rank": self._local_rank,
                "device": evidence.device_facts(self.device),
                "ray": {"node_id": node_id, "address": ray.util.get_node_ip_address()},
                "restored_step": step,
                "restored_from": self.restored_from,
                "model_sha256": model_sha256,
                "momentum_sha256": momentum_sha256,
            }
        )

    def stepped(self, step: int) -> None:
        """Say that optimizer step ``step`` was made. The first of the attempt is recorded, the others cost nothing."""
        if step == self._started + 1:
            self._recorder.first_step(step)

    def report(self, step: int, loss: float, write: Callable[[Path], None], **metrics: Any) -> str:
        """Report the checkpoint of a boundary step, on every rank alike; returns its directory name.

        ``write`` fills an empty directory with the checkpoint; only rank 0 calls it, and uploads. Returns when Ray
        Train has taken the report, which is not yet the commit; at a drill's step, after the hold for its kill.
        """
        if not self.order.is_boundary(step):
            raise ValueError(
                f"step {step} is no checkpoint boundary: report every {self.order.checkpoint_interval} steps and at "
                f"step {self.order.steps}"
            )
        drill = self.order.drill
        held = drill is not None and step == drill.after_step and self._started < drill.after_step
        if held:
            self._keep_a_spare()
            standby.wait_until_ready(STANDBY_WAIT_S)
        # Whoever watches for a commit must find who made it.
        self._recorder.settle()
        # Unique per attempt: a replayed step never writes over bytes that may be committed.
        name = f"checkpoint_step-{step:09d}_attempt-{self.number:03d}"
        told = {"step": step, "loss": loss, **metrics, "attempt": self.number, "steps": self.order.steps}
        if self.rank == 0:
            with tempfile.TemporaryDirectory(prefix="lanyard-checkpoint-") as directory:
                write(Path(directory))
                ray.train.report(told, checkpoint=Checkpoint.from_directory(directory), checkpoint_dir_name=name)
        else:
            ray.train.report(told, checkpoint=None, checkpoint_dir_name=name)
        # Not earlier: its imports would compete with this attempt's own start.
        self._keep_a_spare()
        if drill is not None and held:
            _hold(name, drill.hold_s)
        return name

    def final(self, model_sha256: str, momentum_sha256: str) -> None:
        """Record how this rank ended, at the order's last step."""
        self._recorder.final(self.order.steps, model_sha256, momentum_sha256)

    def __enter__(self) -> Attempt[State]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.close()

    def _keep_a_spare(self) -> None:
        if not self._has_spare:
            standby.keep_one_ready()
            self._has_spare = True

    @property
    def _started(self) -> int:
        if self._start is None:
            raise RuntimeError("call start() before the first step: whoever watches must find who trains")
        return self._start


def _device(order: Order) -> torch.device:
    return ray.train.torch.get_device() if order.device == "cuda" else torch.device("cpu")


def _agree(
    order: Order, store: pafs.FileSystem, restore: Callable[[Checkpoint], State], rank: int
) -> tuple[int, State | None, str | None]:
    """What all ranks do alike: the attempt's number, the state restored, and what ``restored_from`` says of it.

    Rank 0 chooses and the others load exactly that: ranks that each chose for themselves could train apart.
    """
    choice: list[Any] = [None]
    restored = None
    if rank == 0:
        try:
            restored, place, source = _choose(order, store, restore)
            choice[0] = (evidence.next_attempt(store, order.root, order.train_name), place, source, None)
        except Exception as error:
            choice[0] = (0, None, None, f"{type(error).__name__}: {error}")
            _broadcast(choice, order)
            raise
    _broadcast(choice, order)
    number, place, source, problem = choice[0]
    if problem is not None:
        raise RuntimeError(f"rank 0 could not start: {problem}")
    if rank != 0 and place is not None:
        restored = restore(Checkpoint(place, store))
    return number, restored, source


def _broadcast(choice: list[Any], order: Order) -> None:
    if order.world_size > 1:
        device = _device(order)
        dist.broadcast_object_list(choice, src=0, device=device if device.type == "cuda" else None)


def _choose(
    order: Order, store: pafs.FileSystem, restore: Callable[[Checkpoint], State]
) -> tuple[State | None, str | None, str | None]:
    """The state to start from, its place in storage, and what the evidence calls it."""
    latest = ray.train.get_checkpoint()
    if latest is not None:
        restored, place = _last_that_loads(latest, store, restore)
        return restored, place, _name(place)
    if order.resume is not None:
        place = storage_path("resume.checkpoint", order.resume)[1]
        return restore(Checkpoint(place, store)), place, order.resume
    return None, None, None


def _last_that_loads(
    latest: Checkpoint, store: pafs.FileSystem, restore: Callable[[Checkpoint], State]
) -> tuple[State, str]:
    """The run's own last commit that loads, the latest first. Raises CheckpointDamaged when none does."""
    try:
        return restore(Checkpoint(latest.path, store)), latest.path
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
            restored = restore(Checkpoint(path, store))
        except CheckpointDamaged as error:
            problems.append(str(error))
            continue
        print(f"{'; '.join(problems)}; going back to {_name(path)}", flush=True)
        return restored, path
    raise CheckpointDamaged(f"no commit of this run loads: {'; '.join(problems)}")


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


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
        committed = any(_name(entry.checkpoint.path) == name for entry in reported)
        if not committed:
            time.sleep(min(0.1, max(0.0, ends - time.monotonic())))
    print(f"drill: {name} is {'committed' if committed else 'NOT committed'}; holding for the kill", flush=True)
    time.sleep(max(0.0, ends - time.monotonic()))
    print("drill: nobody killed this rank; training goes on", flush=True)
