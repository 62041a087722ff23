"""How long a rank computes on each micro-batch, without the time that it waits for others.

Wall time cannot tell a slow rank from one that waits for it: both take equally long. On CPU this clock reads what the
operating system counts for the training thread: the time it ran, and the time it could have run but its core was
taken. A thread that is blocked in a collective does neither. Autograd runs CPU graphs in the thread that asks for them
and that thread takes part in every parallel kernel, so its time is that of the computation. Waiting for a disk is not
in it.

On CUDA kernels run by themselves, and ``wlb.training.observe.kernel_clock`` measures them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from wlb.attention.profiler_regions import region

_SCHEDULER_STATISTICS = "/proc/thread-self/schedstat"  # Linux: nanoseconds run, nanoseconds runnable, time slices

Seconds = NDArray[np.float64]


class Compute(NamedTuple):
    """What a rank computed in a step: ``seconds`` of each micro-batch, shape (micro_batches,), and how many of them, in
    total, it waited for a core that other processes had."""

    seconds: Seconds
    core_wait_seconds: float


class ComputeClock(Protocol):
    """Measures one step at a time."""

    def begin_step(self, micro_batches: int) -> None: ...

    def measuring(self, phase: str, micro_batch: int) -> AbstractContextManager[None]:
        """Count what runs inside for ``micro_batch``; a trace shows it as "PHASE micro-batch N"."""
        ...

    def end_step(self) -> Compute | None:
        """The step's measurements, or None on all ranks alike if it was not measured; NaN if that failed."""
        ...


class ThreadClock:
    """The clock for CPU; used by one thread, the one that made it."""

    def __init__(self, now: Callable[[], tuple[float, float]] | None = None) -> None:
        self._now = now or thread_seconds()
        self._seconds = np.zeros(0)
        self._core_wait_seconds = 0.0

    def begin_step(self, micro_batches: int) -> None:
        self._seconds = np.zeros(micro_batches)
        self._core_wait_seconds = 0.0

    @contextmanager
    def measuring(self, phase: str, micro_batch: int) -> Iterator[None]:
        with region(f"{phase} micro-batch {micro_batch}"):
            ran_before, waited_before = self._now()
            yield
            ran, waited = self._now()
            self._seconds[micro_batch] += ran - ran_before + waited - waited_before
            self._core_wait_seconds += waited - waited_before

    def end_step(self) -> Compute:
        return Compute(self._seconds, self._core_wait_seconds)


def thread_seconds() -> Callable[[], tuple[float, float]]:
    """A clock of the calling thread: seconds it ran, and seconds it waited for a core (0 where nobody counts them)."""
    try:
        statistics = open(_SCHEDULER_STATISTICS, "rb", buffering=0)  # noqa: SIM115  # it belongs to the clock
    except OSError:
        return lambda: (time.thread_time(), 0.0)

    def now() -> tuple[float, float]:
        # The file's time spent waiting is exact, its time spent running as old as the last timer tick.
        statistics.seek(0)
        return time.thread_time(), int(statistics.read(64).split()[1]) * 1e-9

    return now
