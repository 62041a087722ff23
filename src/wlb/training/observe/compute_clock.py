"""How long a rank computes in a step.

Wall time cannot tell a slow rank from one that waits for it. On a CPU the clock counts the CPU seconds of the training
thread, which has none while it waits in a collective: autograd runs CPU graphs in the thread that asks for them, and
that thread takes part in every parallel kernel. On CUDA it records an event before and one after every forward and
backward and reads them after the last, so collectives that run between the two count, and so does waiting in them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import record_function

from wlb.runtime.clock import Clock, clock_of

thread_seconds = time.thread_time  # CPU seconds of the calling thread


class ComputeClock:
    """Used by one thread, and measures one step at a time."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device, Clock("thread CPU time", lambda: thread_seconds()))
        self._marks: list[tuple[Any, Any]] = []

    @contextmanager
    def measuring(self, phase: str, micro_batch: int) -> Iterator[None]:
        """Count what runs inside; a trace shows it as "PHASE micro-batch N"."""
        with record_function(f"{phase} micro-batch {micro_batch}"):
            begin = self._clock.mark()
            yield
            self._marks.append((begin, self._clock.mark()))

    def end_step(self) -> float:
        """The seconds of the step; waits for the device."""
        marks, self._marks = self._marks, []
        return sum(self._clock.between(end, begin) for begin, end in marks)
