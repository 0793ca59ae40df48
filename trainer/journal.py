"""The journal of optimizer steps: cheap while steps run, converted and reduced over ranks only at boundaries.

Per step a few scalars stay on the device; at a checkpoint boundary one reduction turns the interval's scalars into
entries. A step is in the journal exactly once, in order, whatever was restored in between.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist


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
    """The scalars of the steps since the last boundary, on the device."""

    def __init__(self, parameters: Sequence[torch.Tensor], capacity: int, device: torch.device) -> None:
        """``capacity``: the most steps between two boundaries."""
        self._parameters = list(parameters)
        self._before = [torch.empty_like(parameter) for parameter in self._parameters]
        # One row a step: loss, gradient norm, parameter change.
        self._scalars = torch.zeros(capacity, 3, dtype=torch.float64, device=device)
        self._clock = _CudaClock() if device.type == "cuda" else _Clock()
        self._count = 0
        self._first = 0

    @torch.no_grad()
    def before_step(self) -> None:
        """Keep the parameters as they are, to tell afterwards what the step changed."""
        if self._count == 0:
            self._clock.start()
        torch._foreach_copy_(self._before, self._parameters)

    @torch.no_grad()
    def after_step(self, step: int, loss: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """Take down step ``step``: this rank's ``loss`` (scalar), and norms over the reduced ``gradients``."""
        if self._count == 0:
            self._first = step
        row = self._scalars[self._count]
        row[0] = loss.detach()
        row[1] = _norm(gradients)
        torch._foreach_sub_(self._before, self._parameters)
        row[2] = _norm(self._before)
        self._count += 1
        self._clock.mark()

    def close(self, *, learning_rate: float, batch: int, world_size: int, attempt: int) -> list[dict[str, Any]]:
        """End the interval: reduce over all ranks and return its entries. A collective; every rank calls it.

        The loss is the mean over ranks, a step's time the longest of any rank's, ``batch`` the samples per rank.
        """
        count, self._count = self._count, 0
        if count == 0:
            return []
        seconds = torch.tensor(self._clock.seconds(), dtype=torch.float64, device=self._scalars.device)
        losses = self._scalars[:count, 0].contiguous()
        if world_size > 1:
            dist.all_reduce(losses, op=dist.ReduceOp.SUM)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        rows = torch.stack([losses / world_size, *self._scalars[:count, 1:].unbind(1), seconds], dim=1).tolist()
        return [
            {
                "step": self._first + index,
                "loss": loss,
                "gradient_norm": gradient_norm,
                "parameter_change": parameter_change,
                "learning_rate": learning_rate,
                "samples_per_second": batch * world_size / taken,
                "attempt": attempt,
            }
            for index, (loss, gradient_norm, parameter_change, taken) in enumerate(rows)
        ]


def _norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors))))


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
