"""Warm standby: one spare worker process on each rank's host, with everything imported, for the next attempt.

After a kill Ray starts new worker processes; on a small host most of the recovery goes into their imports. Each rank
therefore asks its own raylet, after its first report, for one more process of exactly its own runtime environment. The
raylet keeps it idle, hands it to the next training worker started there, and ends it with the job.

This is the raylet's PrestartWorkers request, which Ray's Python has no public call for; the pins fix the Ray version
that it was tried with. A refused request costs time at a recovery and nothing else, so it is said and not raised.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import threading
import time
from pathlib import Path

KEEP_S = 24 * 3600
"""How long an unused spare is kept; it ends with its job in any case."""
REQUEST_TIMEOUT_S = 30.0
READY = "lanyard-worker-ready-"
"""A training worker's process leaves an empty file of this name and its pid in the host's temporary directory, once
everything is imported."""

HOOK = "trainer.standby.prepare_process"
MARK = "LANYARD_TRAINING_WORKER"
"""Set in the environment of training workers, and so of their spares, alone."""

# What a worker imports before its first step; torch._dynamo comes in with DistributedDataParallel and torch.optim.
# pydantic.v1 and ray.tune with what Ray Train hands to each worker.
WORKER_MODULES = ("torch", "torch._dynamo", "ray.train.torch", "pydantic.v1", "ray.tune", "trainer.training")


def prepare_process() -> None:
    """Import what a training worker needs before it is given work (Ray's worker_process_setup_hook).

    The hook runs in every process of the job; only those with the mark import anything.
    """
    if os.environ.get(MARK):
        for name in WORKER_MODULES:
            importlib.import_module(name)
        Path(tempfile.gettempdir(), f"{READY}{os.getpid()}").touch()


def keep_one_ready() -> None:
    """Ask this host's raylet for one spare process like this one, without waiting for it."""
    threading.Thread(target=_request, name="standby", daemon=True).start()


def wait_until_ready(limit_s: float) -> bool:
    """Wait until this host has a spare with everything imported, at most ``limit_s`` seconds; whether it has.

    A drill is about a training in its stride: a kill within the seconds that the spare needs would measure imports.
    """
    own = Path(tempfile.gettempdir(), f"{READY}{os.getpid()}")
    deadline = time.monotonic() + limit_s
    while not any(each != own and _runs(each) for each in own.parent.glob(f"{READY}*")):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _runs(ready: Path) -> bool:
    return Path("/proc", ready.name.removeprefix(READY)).exists()


def _request() -> None:
    try:
        _prestart()
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        print(f"no standby worker ({type(error).__name__}: {reason}); a recovery will take longer", flush=True)


def _prestart() -> None:
    import ray
    from ray._private import worker
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc

    context = ray.get_runtime_context()
    node = worker.global_worker.node
    request = node_manager_pb2.PrestartWorkersRequest(
        language=common_pb2.Language.PYTHON,
        num_workers=1,
        job_id=bytes.fromhex(context.get_job_id()),
        keep_alive_duration_secs=KEEP_S,
    )
    request.runtime_env_info.serialized_runtime_env = context.get_runtime_env_string()
    channel = init_grpc_channel(f"{node.node_ip_address}:{node.node_manager_port}")
    try:
        stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
        stub.PrestartWorkers(request, timeout=REQUEST_TIMEOUT_S)
    finally:
        channel.close()
