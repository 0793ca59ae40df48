"""Secrets that must be found nowhere: each in the forms in which it could have been written down."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote


class Canaries:
    """Secrets by name. `search` says what was found, and never repeats a secret."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        assert all(len(value) >= 16 for value in secrets.values()), "too short to be recognised"
        self._forms = {name: tuple(dict.fromkeys(_forms(value))) for name, value in secrets.items()}

    def search(self, places: Iterable[tuple[str, bytes]]) -> list[str]:
        """`<secret> in <place>` for each place that holds one, in whatever form."""
        found = []
        for place, content in places:
            found += [f"{name} in {place}" for name, forms in self._forms.items() if any(f in content for f in forms)]
        return found


def _forms(secret: str) -> Iterator[bytes]:
    raw = secret.encode()
    yield raw
    yield quote(secret, safe="").encode()
    yield json.dumps(secret)[1:-1].encode()
    yield raw.hex().encode()
    for variant in (base64.b64encode, base64.urlsafe_b64encode):
        for shift in range(3):
            # Base64 depends on where in a longer text the secret begins: what is common to all continuations.
            coded = variant(b"\0" * shift + raw)
            yield coded[4 if shift else 0 : -4]


def files(root: Path, private: Iterable[Path] = ()) -> Iterator[tuple[str, bytes]]:
    """Every regular file below ``root`` with its bytes, except ``private`` ones."""
    spared = {path.resolve() for path in private}
    for path in sorted(root.rglob("*")):
        try:
            if path.is_file() and not path.is_symlink() and path.resolve() not in spared:
                yield str(path), path.read_bytes()
        except OSError:
            continue  # it went while it was looked at, as logs of a host being released do
