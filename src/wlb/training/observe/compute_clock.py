"""How long a rank computes on each micro-batch of a step.

Wall time cannot tell a slow rank from one that waits for it. On a CPU the clock counts the CPU seconds of the training
thread, which has none while it waits in a collective: autograd runs CPU graphs in the thread that asks for them, and
that thread takes part in every parallel kernel. On CUDA it records an event before and one after every forward and
backward and reads them after the last, so collectives that run between the two count, and so does waiting in them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import record_function

Seconds = NDArray[np.float64]
thread_seconds = time.thread_time  # CPU seconds of the calling thread


class ThreadClock:
    """The clock for CPU; used by one thread, and measures one step at a time."""

    def begin_step(self, micro_batches: int) -> None:
        self._seconds = np.zeros(micro_batches)

    @contextmanager
    def measuring(self, phase: str, micro_batch: int) -> Iterator[None]:
        """Count what runs inside for ``micro_batch``; a trace shows it as "PHASE micro-batch N"."""
        with record_function(f"{phase} micro-batch {micro_batch}"):
            before = thread_seconds()
            yield
            self._seconds[micro_batch] += thread_seconds() - before

    def end_step(self) -> Seconds:
        """The seconds of each micro-batch, shape (micro_batches,)."""
        return self._seconds


class EventClock(ThreadClock):
    """The clock for CUDA: only ``end_step`` waits for the device."""

    def begin_step(self, micro_batches: int) -> None:
        super().begin_step(micro_batches)
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measuring(self, phase: str, micro_batch: int) -> Iterator[None]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with record_function(f"{phase} micro-batch {micro_batch}"):
            start.record()
            yield
            end.record()
        self._events.append((micro_batch, start, end))

    def end_step(self) -> Seconds:
        for micro_batch, start, end in self._events:
            end.synchronize()
            self._seconds[micro_batch] += start.elapsed_time(end) / 1000
        return self._seconds
