"""Properties are tried with the same examples every time, so that red means this change; `make search` tries others."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("hypothesis"):  # the application's environment has none
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, deadline=None)  # a loaded machine is no finding
    settings.register_profile("search", max_examples=3000, deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
