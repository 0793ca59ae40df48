"""Publishing: an export under ``exports/<submission id>/``, complete and checked or not there. Any workload.

``result.json`` says what the ranks' evidence holds, ``SHA256SUMS`` comes last. Each object is read back and compared.
Bytes that differ are never overwritten; an interrupted upload is finished with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.fs as pafs

from trainer import evidence, pins, storage
from trainer.job import Order

MANIFEST = "SHA256SUMS"
RESULT = "result.json"
UPLOAD_TRIES = 5


class ExportError(RuntimeError):
    """The training cannot be exported as proved; the message says what does not hold."""


def last_attempt(order: Order, store: pafs.FileSystem) -> int:
    """The last attempt that left evidence of having started. Raises ExportError where none did, OSError."""
    for attempt in reversed(evidence.attempts(store, order.root, order.train_name)):
        if evidence.starts(store, order.root, order.train_name, attempt):
            return attempt
    raise ExportError("no rank left evidence of having started")


def final_ranks(
    order: Order, store: pafs.FileSystem, attempt: int, committed: Mapping[str, str] | None = None, name: str = ""
) -> list[dict[str, Any]]:
    """Where each rank of the last attempt ended: ``{"rank", "model_sha256", "momentum_sha256"}``.

    Raises ExportError unless all ended at the last step with the same state: that of rank 0, or where the hashes
    ``committed`` of the commit ``name`` are known, those.
    """
    ranks: list[dict[str, Any]] = []
    wanted, like = committed, f"the commit {name}"
    for rank in range(order.world_size):
        document = evidence.final(store, order.root, order.train_name, attempt, rank)
        if document is None:
            raise ExportError(f"rank {rank} of attempt {attempt} left no final evidence")
        ended = {key: document.get(key) for key in ("model_sha256", "momentum_sha256")}
        if wanted is None:
            wanted, like = {key: str(value) for key, value in ended.items()}, "rank 0"
        different = [key for key, value in wanted.items() if ended[key] != value]
        if document.get("step") != order.steps or different:
            raise ExportError(
                f"rank {rank} of attempt {attempt} ended at step {document.get('step')} with "
                f"{' and '.join(different) or 'the state'} unlike {like}; the ranks trained apart"
            )
        ranks.append({"rank": rank, **wanted})
    return ranks


def result_document(
    order: Order, checkpoint: str, final_loss: float, ranks_final: Sequence[Mapping[str, Any]], **more: Any
) -> dict[str, Any]:
    """result.json of a training that ended well; ``checkpoint`` is the directory name of its last commit."""
    return {
        "schema": 1,
        "status": "succeeded",
        "run": order.run,
        "final_step": order.steps,
        "final_loss": final_loss,
        **more,
        "checkpoint": f"train/{order.train_name}/{checkpoint}",
        "ranks_final": list(ranks_final),
        "versions": {**pins.installed(list(order.pins)), "python": evidence.versions()["python"]},
    }


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """A document as it is stored. Raises ValueError for a number that is not finite: it is no JSON and no result."""
    return json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"


def with_manifest(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """``files`` and, as the last, the manifest that names exactly them."""
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items())]
    return {**files, MANIFEST: "".join(lines).encode()}


def publish(order: Order, store: pafs.FileSystem, files: Mapping[str, bytes]) -> str:
    """Store the export's files in their order; returns its ``s3://`` place.

    Raises DifferingBytes when another export is in the place, and OSError when storage stays away.
    """
    upload(store, storage.join(order.root, "exports", order.submission_id), files)
    return f"{order.storage}/exports/{order.submission_id}"


def upload(store: pafs.FileSystem, folder: str, files: Mapping[str, bytes]) -> None:
    """Store ``files`` in their order (the manifest last), each read back; what is there already must be the same.

    Tried again with the same bytes while storage does not answer. Raises DifferingBytes at once, OSError at last.
    """
    for name, data in files.items():
        for attempt in range(1, UPLOAD_TRIES + 1):
            try:
                storage.put_once(store, storage.join(folder, name), data)
                break
            except OSError as error:
                if attempt == UPLOAD_TRIES:
                    raise
                print(f"storing {name} failed ({' '.join(str(error).split())[:200]}); trying again", flush=True)
                time.sleep(2.0**attempt)
