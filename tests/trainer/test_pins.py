"""The pins hold exactly, and a difference says which, what was found, what was wanted, and what to do."""

from __future__ import annotations

import pytest
import torch

from trainer import pins

HERE = {name: str(version) for name, version in pins.installed(["torch", "ray", "rerun-sdk", "pillow"]).items()}


def test_the_pinned_environment_passes() -> None:
    pins.enforce(HERE, "cpu", "the driver")


def test_torch_answers_for_the_build_that_is_loaded() -> None:
    assert HERE["torch"] == torch.__version__


@pytest.mark.parametrize("name", sorted(HERE))
def test_another_version_is_refused_with_both_versions_and_a_remedy(name: str) -> None:
    with pytest.raises(pins.PinError) as caught:
        pins.enforce({**HERE, name: "0.0.1"}, "cpu", "rank 3")
    message = str(caught.value)
    assert all(part in message for part in (name, HERE[name], "0.0.1", "rank 3", "requirements"))


def test_every_difference_is_named_at_once() -> None:
    with pytest.raises(pins.PinError, match=r"ray is .*torch is "):
        pins.enforce({**HERE, "ray": "1", "torch": "1"}, "cpu", "the driver")


def test_the_wrong_build_of_the_right_version_is_refused() -> None:
    other = HERE["torch"].split("+")[0] + "+cu000"
    with pytest.raises(pins.PinError, match="torch"):
        pins.enforce({**HERE, "torch": other}, "cpu", "the driver")


def test_a_missing_package_is_said_to_be_missing() -> None:
    with pytest.raises(pins.PinError, match="no-such-package is not installed"):
        pins.enforce({"no-such-package": "1"}, "cpu", "the driver")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_cuda_profile_fails_without_cuda() -> None:
    with pytest.raises(pins.PinError, match="CUDA"):
        pins.enforce(HERE, "cuda", "rank 0")
