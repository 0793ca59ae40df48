"""A copy of the training application with Ray's own settings: nothing tuned, nothing imported or started ahead."""

from __future__ import annotations

from pathlib import Path

OVERRIDES = {
    "constants.py": (("TRAIN_SETTINGS",), 'TRAIN_SETTINGS = {"RAY_TRAIN_V2_ENABLED": "1"}  # type: ignore[misc]\n'),
    "standby.py": (
        ("WORKER_MODULES", "keep_one_ready"),
        "WORKER_MODULES = ()  # type: ignore[assignment]\n\n\ndef keep_one_ready() -> None:\n    pass\n",
    ),
}
"""What the copy says at the end of each file: the names it replaces, and with what."""


def without_preparation(package: Path) -> None:
    """Change a copy of `trainer` so that Ray runs with its own settings and nothing is imported or started ahead.

    Raises RuntimeError when a name that is to be replaced is not there any more.
    """
    for name, (replaced, text) in OVERRIDES.items():
        file = package / name
        source = file.read_text()
        for each in replaced:
            if each not in source:
                raise RuntimeError(f"trainer/{name} has no {each} any more: correct bench/ray_overrides.py")
        file.write_text(f"{source}\n\n{text}")
