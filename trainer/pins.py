"""The pins: exactly the versions the run was planned with, in the driver and in every new or restarted worker."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata


class PinError(RuntimeError):
    """This environment is not the pinned one; the message says what was found, what was wanted, and the remedy."""


def installed(names: list[str]) -> dict[str, str | None]:
    """The version of each distribution, None where it is not installed. Torch answers for itself: its own
    ``__version__`` names the build (``+cpu``, ``+cu130``) that is really loaded."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if found.get("torch") is not None:
        import torch

        found["torch"] = str(torch.__version__)
    return found


def enforce(pins: Mapping[str, str], device: str, where: str) -> None:
    """Compare the environment with ``pins``; ``device`` is "cpu" or "cuda", ``where`` names the process.

    Raises PinError naming every difference, and where a CUDA profile meets a Torch that cannot use CUDA.
    """
    found = installed(list(pins))
    problems = [
        f"{name} is {found[name] or 'not installed'}, wanted {wanted}"
        for name, wanted in sorted(pins.items())
        if found[name] != wanted
    ]
    if device == "cuda":
        problems += _cuda_problems()
    if problems:
        raise PinError(
            f"pins do not hold in {where}: {'; '.join(problems)}. Prepare the hosts from trainer/requirements.txt "
            "for this profile (the Torch build included), then start again"
        )


def _cuda_problems() -> list[str]:
    import torch

    if torch.version.cuda is None:
        return [f"the profile asks for CUDA and torch {torch.__version__} is a build without it"]
    if not torch.cuda.is_available():
        return ["the profile asks for CUDA and this process sees no CUDA device"]
    return []
