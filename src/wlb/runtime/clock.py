"""Clocks that mark moments, on CPUs and GPUs, and later tell the seconds between two of them.

Wall time cannot tell a slow rank from a rank that waits for it. So on CPUs we measure CPU seconds of the training
thread, which stand still while it waits in a collective. Autograd runs CPU graphs in the calling thread, and that
thread takes part in every parallel kernel. The time between two CUDA events includes collectives.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import sub
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

_LAUNCH_CYCLES = 600_000  # GPU cycles, about 0.3 ms, in which a CPU launches a call


class Clock(NamedTuple):
    """Marks moments, and tells the seconds between a later and an earlier one; profiles store its ``name``."""

    name: str
    mark: Callable[[], Any]
    between: Callable[[Any, Any], float] = sub
    get_ready: Callable[[int], object] = lambda calls: None  # prepares for so many short calls in a row


WALL_TIME = Clock("wall time", time.perf_counter)
PROCESS_TIME = Clock("process CPU time", time.process_time)


def clock_of(device: torch.device, on_cpu: Clock = WALL_TIME) -> Clock:
    """CUDA events on a GPU, with work queued before short calls, so that the GPU does not wait for their launches."""
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
    """Measures how long a rank computes in a step; for one thread and one step at a time."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device, Clock("thread CPU time", lambda: thread_seconds()))
        self._marks: list[tuple[Any, Any]] = []

    @contextmanager
    def measuring(self, phase: str, micro_batch: int) -> Iterator[None]:
        """Count the code inside; a trace shows it as "PHASE micro-batch N"."""
        with record_function(f"{phase} micro-batch {micro_batch}"):
            begin = self._clock.mark()
            yield
            self._marks.append((begin, self._clock.mark()))

    def end_step(self) -> float:
        """The seconds of the step; waits for the device."""
        marks, self._marks = self._marks, []
        return sum(self._clock.between(end, begin) for begin, end in marks)
