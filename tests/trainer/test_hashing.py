"""Hashes of state see every bit and are the same on every machine; so is the synthetic data."""

from __future__ import annotations

import hashlib
import math
import struct

import pytest
import torch

from tests.trainer.small_run import (
    RECIPE,
)
from trainer.hashing import model_sha256, momentum_sha256
from trainer.synthetic import build_model, build_optimizer, held_out_loss, shard


def test_hash_sees_every_bit_name_type_and_shape() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    changed = tensor.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(math.inf))
    hashes = {
        model_sha256(state)
        for state in (
            {"a": tensor},
            {"b": tensor},
            {"a": changed},
            {"a": tensor.double()},
            {"a": tensor.reshape(3, 2)},
            {"a": tensor.t()},
            {"a": tensor, "b": tensor},
            {"a": tensor.bfloat16()},
        )
    }
    assert len(hashes) == 8
    assert model_sha256({"a": tensor.t().contiguous()}) == model_sha256({"a": tensor.t()})
    assert model_sha256({"a": tensor, "b": changed}) == model_sha256({"b": changed, "a": tensor})
    with pytest.raises(TypeError, match="a is str"):
        model_sha256({"a": "tensor"})


def test_hash_is_the_same_on_every_machine() -> None:
    written = b'["w","torch.float32",[1,2]]\n' + struct.pack("<ff", 1.0, -2.5)
    assert model_sha256({"w": torch.tensor([[1.0, -2.5]])}) == hashlib.sha256(written).hexdigest()
    fresh = build_optimizer(RECIPE, build_model(RECIPE)).state_dict()
    assert momentum_sha256(fresh) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_synthetic_data_is_a_function_of_the_recipe() -> None:
    first, again = shard(RECIPE, 0, 2), shard(RECIPE, 0, 4)
    assert torch.equal(first[0], again[0])
    assert first[0].shape == (RECIPE["samples_per_rank"], RECIPE["features"])
    assert not torch.equal(first[0], shard(RECIPE, 1, 2)[0])
    assert not torch.equal(first[0], shard({**RECIPE, "seed": 8}, 0, 2)[0])
    assert held_out_loss(RECIPE, build_model(RECIPE)) == held_out_loss(RECIPE, build_model(RECIPE))
    with pytest.raises(ValueError, match="rank 2 does not exist"):
        shard(RECIPE, 2, 2)
