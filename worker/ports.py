"""TCP ports of the embedded services on 127.0.0.1."""

from __future__ import annotations

import hashlib
import itertools
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

LOOPBACK: Final = "127.0.0.1"

# Below Linux's usual ephemeral range (32768 and up): a client that keeps dialling a port there while its server
# restarts can be given that very port as its own and connect to itself. Above Ray's worker ports (10002-19999).
_RANGE: Final = range(20_000, 32_000)
_STRIDE: Final = 16


def choose(home: Path, names: Sequence[str], before: Mapping[str, int]) -> dict[str, int]:
    """A free port for each name: the one it had before where that is free, so that addresses which hosts, shells and
    browser tabs remember stay right; else one from a range that differs from checkout to checkout.

    Raises OSError where the whole range is taken.
    """
    chosen: dict[str, int] = {}
    candidates = _candidates(home)
    for name in names:
        wanted = [before[name]] if name in before else []
        for port in itertools.chain(wanted, candidates):
            if port not in chosen.values() and (port in wanted or port not in before.values()) and is_free(port):
                chosen[name] = port
                break
        else:
            raise OSError(f"no free port between {_RANGE.start} and {_RANGE.stop}")
    return chosen


def is_free(port: int) -> bool:
    """Whether a server could bind `port` on loopback now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Go's servers do: TIME_WAIT is no obstacle
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _candidates(home: Path) -> Iterator[int]:
    digest = hashlib.sha256(str(home).encode()).digest()
    start = int.from_bytes(digest[:4], "big") % (len(_RANGE) // _STRIDE) * _STRIDE
    return (_RANGE[(start + offset) % len(_RANGE)] for offset in range(len(_RANGE)))
