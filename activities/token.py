"""The per-run Ray token: derived, never stored in history, the same for every worker of a deployment."""

from __future__ import annotations

import hashlib
import hmac


def run_token(secret: bytes, run_key: str) -> str:
    """The token (64 hex characters) of one run: HMAC-SHA256 of the deployment secret and the run's key.

    A worker that takes over on another machine recomputes it, so that it can still stop the run's job.
    """
    return hmac.new(secret, f"lanyard ray token\n{run_key}".encode(), hashlib.sha256).hexdigest()


def secret_fingerprint(secret: bytes) -> str:
    """Sixteen hex characters by which two workers find out that they hold different secrets; not reversible."""
    return hmac.new(secret, b"lanyard secret fingerprint", hashlib.sha256).hexdigest()[:16]
