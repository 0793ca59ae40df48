"""Names derived from a run's identity. One place, so that whoever takes over finds what was created."""

from __future__ import annotations

import hashlib
import re

_SLUG = re.compile(r"[^a-z0-9]+")


def run_key(workflow_id: str, namespace: str, original_run_id: str) -> str:
    """The stem of every name of a run: `<slug, at most 32 characters>-<10 hex digits>`.

    The digest covers the *original* execution run id, which Temporal keeps across resets and renews for a fresh
    start: a reset run meets its own resources, a new run never meets those of an earlier one.
    """
    slug = _SLUG.sub("-", workflow_id.lower()).strip("-")[:32].strip("-") or "run"
    digest = hashlib.sha256("\0".join((namespace, workflow_id, original_run_id)).encode()).hexdigest()
    return f"{slug}-{digest[:10]}"


def custody_id(key: str) -> str:
    """Workflow id of the run's custody."""
    return f"custody-{key}"


def reaper_id(deployment: str) -> str:
    """Id of the deployment's reaper: of its schedule, and the stem of its executions' workflow ids."""
    return f"reaper-{deployment}"


def submission_id(key: str, part: str) -> str:
    """Submission id of one of the run's Ray Jobs; `part` is `train`, `parity` or `strike`."""
    return f"{key}-{part}"


def run_root(storage_uri: str, key: str) -> str:
    """The run's own root in storage."""
    return f"{storage_uri.rstrip('/')}/{key}"
