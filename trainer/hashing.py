"""Hashes of model parameters and of optimizer momentum: one definition, for the ranks that claim them and for
the inspector that recomputes them from the exported bytes.

Each tensor contributes one JSON header line, ``["name","torch.float32",[16,1]]``, and then its elements as
little-endian bytes in row-major order; tensors follow each other in the order of their names. Device, strides
and gradient flags do not matter; name, type, shape and every bit of every element do.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch


def model_sha256(state_dict: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex) of a model's ``state_dict()``.

    Pass the bare module's (``ddp.module.state_dict()``), since DistributedDataParallel prefixes every name.
    Raises TypeError for an entry that is no tensor.
    """
    return tensors_sha256(state_dict)


def momentum_sha256(optimizer_state: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of the momentum buffers in a ``torch.optim.SGD.state_dict()``.

    Parameters that have no buffer yet contribute nothing, so a fresh optimizer hashes as the empty input,
    which is what a rank that restored nothing reports.
    """
    buffers: dict[str, torch.Tensor] = {}
    for index, state in optimizer_state["state"].items():
        buffer = state.get("momentum_buffer")
        if buffer is not None:
            # Indices count the parameters; padding keeps their order when they are sorted as names.
            buffers[f"{int(index):08d}"] = buffer
    return tensors_sha256(buffers)


def optimizer_sha256(optimizer_state: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of everything that any ``torch.optim`` ``state_dict()`` keeps per parameter (numbers as float64).

    A fresh optimizer hashes as the empty input.
    """
    kept: dict[str, torch.Tensor] = {}
    for index, state in optimizer_state["state"].items():
        for name, value in state.items():
            if value is not None:
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
                kept[f"{int(index):08d}.{name}"] = tensor
    return tensors_sha256(kept)


def tensors_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex) over named tensors, as the module's docstring defines it."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}, not a tensor")
        header = json.dumps([name, str(tensor.dtype), list(tensor.shape)], separators=(",", ":"))
        digest.update(header.encode() + b"\n")
        digest.update(_little_endian(tensor))
    return digest.hexdigest()


def _little_endian(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel() == 0:
        return b""
    # Seen as bytes rather than through numpy, which has no bfloat16.
    raw = flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())
    if sys.byteorder == "big":
        raw = raw.flip(1)
    return bytes(raw.contiguous().numpy().tobytes())
