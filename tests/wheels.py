"""Wheels in small: distributions with a name and a version, for a pip that must not ask anybody."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest


def offer(folder: Path, name: str, version: str) -> None:
    """Put a wheel there that holds `<name>/version.py` and nothing to run."""
    told = name.replace("-", "_")
    info = f"{told}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{told}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{told}/version.py", f"__version__ = '{version}'\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def only_offered(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Have pip find what lies in this folder, and nothing else."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        patch.delenv(name)
    patch.setenv("PIP_CONFIG_FILE", os.devnull)
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(folder))
