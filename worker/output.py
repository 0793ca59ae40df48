"""Output that may be lost, but never fails: nothing that this program guards depends on somebody reading along."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Lossy(io.FileIO):
    """A descriptor that takes every write. What cannot be written (the reader is gone, the terminal was closed, the
    disk is full) is dropped."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            written: int | None = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def outlive_readers() -> None:
    """From now on printing never raises, on stdout and on stderr.

    Ctrl-C in `make demo 2>&1 | tee log` ends `tee` too, and what has to be said while a run is aborted and released
    must not be what ends that. Done below everything that prints (print, rich, logging, tracebacks), because each of
    them has its own way to fail.
    """
    _occupy_closed()
    sys.stdout = _lossy(1, sys.stdout)
    sys.stderr = _lossy(2, sys.stderr)


def _occupy_closed() -> None:
    """A standard descriptor that was closed from the start would become a lock, a log or a connection, and whatever
    prints would write there."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one


def _lossy(number: int, before: TextIO | None) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_Lossy(number, "w", closefd=False)),
        encoding=before.encoding if before else "utf-8",
        errors="backslashreplace",  # a terminal that lacks a character is no reason to fail either
        line_buffering=True,
    )
