"""How long a rank computes on each micro-batch, without the time that it waits for others.

Wall time cannot tell a slow rank from one that waits for it: both take equally long. On CPU this clock reads what the
operating system counts for the training thread: the time it ran, and the time it could have run but its core was
taken. A thread that is blocked in a collective does neither. Autograd runs CPU graphs in the thread that asks for them
and that thread takes part in every parallel kernel, so its time is that of the computation. Waiting for a disk is not
in it.

On CUDA kernels run by themselves, and ``wlb.training.kernel_clock`` measures them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wlb.regions import region

_SCHEDULER_STATISTICS = "/proc/thread-self/schedstat"  # Linux: nanoseconds run, nanoseconds runnable, time slices

Seconds = NDArray[np.float64]


class ComputeClock(Protocol):
    """Measures one step at a time."""

    def begin_step(self, micro_batches: int) -> None: ...

    def measuring(self, phase: str, micro_batch: int) -> AbstractContextManager[None]:
        """Count what runs inside for ``micro_batch``; a trace shows it as "PHASE micro-batch N"."""
        ...

    def end_step(self) -> Seconds | None:
        """Seconds spent on each micro-batch, shape (micro_batches,), or None if this step was not measured."""
        ...


class ThreadClock:
    """The clock for CPU; used by one thread, the one that made it."""

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or thread_seconds()
        self._seconds = np.zeros(0)

    def begin_step(self, micro_batches: int) -> None:
        self._seconds = np.zeros(micro_batches)

    @contextmanager
    def measuring(self, phase: str, micro_batch: int) -> Iterator[None]:
        with region(f"{phase} micro-batch {micro_batch}"):
            started = self._now()
            yield
            self._seconds[micro_batch] += self._now() - started

    def end_step(self) -> Seconds:
        return self._seconds


def thread_seconds() -> Callable[[], float]:
    """A clock of the calling thread: seconds it ran or waited for a core; where only that is known, that it ran."""
    try:
        statistics = open(_SCHEDULER_STATISTICS, "rb", buffering=0)  # noqa: SIM115  # it belongs to the clock
    except OSError:
        return time.thread_time

    def now() -> float:
        # Time spent runnable is exact here; time spent running is as old as the last timer tick.
        statistics.seek(0)
        return time.thread_time() + int(statistics.read(64).split()[1]) * 1e-9

    return now
