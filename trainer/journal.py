"""The journal of optimizer steps: cheap while steps run, converted and reduced over ranks only at boundaries.

Per step a few tensors are kept on the device; at a checkpoint boundary one reduction turns the interval into entries.
 A step is in the journal exactly once, in order, whatever was restored in between.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

MOST_STEPS_KEPT: Final = 64
MOST_ELEMENTS_KEPT: Final = 4_000_000
"""Bounds on what is kept between two computations: steps, and elements of parameters over all of them (16 MB as
float32, and as much of gradients)."""


class Journal:
    """Entries of steps 1..n: ``{"step", "loss", "gradient_norm", "parameter_change", "learning_rate",
    "samples_per_second", "attempt"}``."""

    def __init__(self, entries: Iterable[dict[str, Any]] = ()) -> None:
        """Raises ValueError unless ``entries`` are those of steps 1, 2, ..., each once."""
        self._entries: list[dict[str, Any]] = []
        self.extend(entries)

    @property
    def last_step(self) -> int:
        """The last step journaled; 0 when there is none."""
        return len(self._entries)

    @property
    def entries(self) -> tuple[dict[str, Any], ...]:
        """All entries, by step."""
        return tuple(self._entries)

    def extend(self, entries: Iterable[dict[str, Any]]) -> None:
        """Append the next steps' entries. Raises ValueError for a step that is not the next, and keeps what it had."""
        new = list(entries)
        for expected, entry in enumerate(new, start=self.last_step + 1):
            if entry["step"] != expected:
                raise ValueError(f"step {entry['step']} would be journaled where step {expected} belongs")
        self._entries += new


class Interval:
    """The steps since the last boundary, as tensors on the device.

    What a step costs here is one copy of the parameters and one of the gradients, into rows of buffers that are made
    once; everything is computed from those a batch of steps at a time.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], device: torch.device) -> None:
        """``parameters``: those the optimizer changes in place, in the order their gradients are given."""
        # The same memory without autograd, which would otherwise have to be told at each step to look away.
        self._parameters = [parameter.detach() for parameter in parameters]
        elements = sum(parameter.numel() for parameter in parameters)
        self._batch = max(1, min(MOST_STEPS_KEPT, MOST_ELEMENTS_KEPT // max(1, elements)))
        # Row 0 is the parameters before the batch's first step.
        self._copies, self._copy_rows = self._buffer(self._batch + 1, device)
        self._gradients, self._gradient_rows = self._buffer(self._batch, device)
        self._losses: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._clock = _CudaClock() if device.type == "cuda" else _Clock()
        self._device = device

    def open(self) -> None:
        """Begin: take down the parameters as they are, and the time."""
        torch._foreach_copy_(self._copy_rows[0], self._parameters)
        self._clock.start()

    def after_step(self, loss: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """Take down a step just made: this rank's ``loss`` (scalar) and the reduced ``gradients``, one a parameter."""
        step = len(self._losses)
        self._losses.append(loss.detach())
        torch._foreach_copy_(self._gradient_rows[step], gradients)
        torch._foreach_copy_(self._copy_rows[step + 1], self._parameters)
        self._clock.mark()
        if step + 1 == self._batch:
            self._compute()

    def close(
        self, *, last_step: int, learning_rate: float, batch: int, world_size: int, attempt: int
    ) -> list[dict[str, Any]]:
        """End the interval at ``last_step``: reduce over all ranks and return its entries. Every rank calls it.

        Loss and a step's time are means over ranks (a collective ends every step, so the mean times of an interval add
        up to the time it took); ``batch`` is the samples per rank.
        """
        self._compute()
        # One column a step: loss, gradient norm, parameter change.
        columns = torch.cat(self._rows, dim=1)
        self._rows = []
        seconds = torch.tensor(self._clock.seconds(), dtype=torch.float64, device=self._device)
        reduced = torch.stack([columns[0], seconds])
        if world_size > 1:
            dist.all_reduce(reduced, op=dist.ReduceOp.SUM)
        losses, seconds = reduced / world_size
        rows = torch.stack([losses, columns[1], columns[2], seconds], dim=1).tolist()
        return [
            {
                "step": step,
                "loss": loss,
                "gradient_norm": gradient_norm,
                "parameter_change": parameter_change,
                "learning_rate": learning_rate,
                "samples_per_second": batch * world_size / taken,
                "attempt": attempt,
            }
            for step, (loss, gradient_norm, parameter_change, taken) in enumerate(rows, start=last_step - len(rows) + 1)
        ]

    def _compute(self) -> None:
        count = len(self._losses)
        if count == 0:
            return
        changes = self._copies[1 : count + 1] - self._copies[:count]
        norms = [torch.linalg.vector_norm(each, dim=1) for each in (self._gradients[:count], changes)]
        self._rows.append(torch.stack([torch.stack(self._losses).to(changes.dtype), *norms]).double())
        self._losses = []
        self._copies[0].copy_(self._copies[count])

    def _buffer(self, rows: int, device: torch.device) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """Room for ``rows`` copies, ``[rows, elements]``, and each row as one view for each parameter."""
        sizes = [parameter.numel() for parameter in self._parameters]
        dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in self._parameters))
        buffer = torch.zeros(rows, sum(sizes), dtype=dtype, device=device)
        views = [
            [part.view(each.shape) for part, each in zip(row.split(sizes), self._parameters, strict=True)]
            for row in buffer
        ]
        return buffer, views


class _Clock:
    """Durations of steps on the CPU, where work is done when the call returns."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def start(self) -> None:
        self._marks = [time.perf_counter()]

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        # A step shorter than the clock's tick still took time.
        return [max(after - before, 1e-9) for before, after in zip(self._marks, self._marks[1:], strict=False)]


class _CudaClock:
    """Durations of steps on the device's own clock, so that no step waits for the one before to be measured."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        self._events = []
        self.mark()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        self._events[-1].synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [max(before.elapsed_time(after) / 1000, 1e-9) for before, after in pairs]
