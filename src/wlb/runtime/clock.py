"""Clocks that mark moments, also on a GPU, and tell the seconds between two of them afterwards.

Wall time cannot tell a slow rank from one that waits for it. On a CPU a rank's computing is therefore measured in CPU
seconds of the training thread, which has none while it waits in a collective: autograd runs CPU graphs in the thread
that asks for them, and that thread takes part in every parallel kernel. Between two CUDA events collectives count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import sub
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

_LAUNCH_CYCLES = 600_000  # of a GPU: about 0.3 ms, in which a CPU launches a call


class Clock(NamedTuple):
    """Marks moments, and tells the seconds between a later and an earlier one; profiles have its ``name``."""

    name: str
    mark: Callable[[], Any]
    between: Callable[[Any, Any], float] = sub
    get_ready: Callable[[int], object] = lambda calls: None  # for so many short calls, one after another


WALL_TIME = Clock("wall time", time.perf_counter)
PROCESS_TIME = Clock("process CPU time", time.process_time)


def clock_of(device: torch.device, on_cpu: Clock = WALL_TIME) -> Clock:
    """CUDA events on a GPU, which is kept busy before short calls, or it would wait for the CPU that launches them."""
    if device.type != "cuda":
        return on_cpu
    return Clock("CUDA events", _recorded, _between, lambda calls: torch.cuda._sleep(calls * _LAUNCH_CYCLES))


def _recorded() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
    return event


def _between(end: torch.cuda.Event, begin: torch.cuda.Event) -> float:
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


thread_seconds = time.thread_time  # CPU seconds of the calling thread


class ComputeClock:
    """How long a rank computes in a step; used by one thread, and measures one step at a time."""

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
