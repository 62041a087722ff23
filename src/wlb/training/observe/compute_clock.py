"""How long a rank computes on each micro-batch, without the time that it waits for others.

Wall time cannot tell a slow rank from one that waits for it: both take equally long. On CPU this clock reads what the
operating system counts for the training thread: the time it ran, and the time it could have run but its core was
taken. A thread that is blocked in a collective does neither. Autograd runs CPU graphs in the thread that asks for them
and that thread takes part in every parallel kernel, so its time is that of the computation. Waiting for a disk is not
in it.

On CUDA kernels run by themselves, so there every now and then a step runs under ``torch.profiler``. A kernel belongs to
the micro-batch whose region was open on the CPU when it was launched, whichever thread launched it: the backward's own
thread does so while the training thread is inside ``measuring``. NCCL's kernels, which mostly wait for other ranks, and
copies are left out.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from wlb.attention.profiler_regions import region

_SCHEDULER_STATISTICS = "/proc/thread-self/schedstat"  # Linux: nanoseconds run, nanoseconds runnable, time slices
_MICRO_BATCH = re.compile(r"\w+ micro-batch (\d+)")
_LAUNCH = re.compile(r"cu(da)?\w*Launch")  # cudaLaunchKernel, cuLaunchKernelEx, cudaGraphLaunch, ...
_NOT_COMPUTE = re.compile(r"nccl|Memcpy|Memset")
_MICROSECOND = 1e-6

Seconds = NDArray[np.float64]


class Compute(NamedTuple):
    """What a rank computed in a step: ``seconds`` of each micro-batch, shape (micro_batches,), and how many of them, in
    total, it waited for a core that other processes had."""

    seconds: Seconds
    core_wait_seconds: float


class ThreadClock:
    """The clock for CPU; used by one thread, the one that made it. It measures one step at a time."""

    def __init__(self, now: Callable[[], tuple[float, float]] | None = None) -> None:
        self._now = now or thread_seconds()

    def begin_step(self, micro_batches: int) -> None:
        self._seconds = np.zeros(micro_batches)
        self._core_wait_seconds = 0.0

    @contextmanager
    def measuring(self, phase: str, micro_batch: int) -> Iterator[None]:
        """Count what runs inside for ``micro_batch``; a trace shows it as "PHASE micro-batch N"."""
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


class KernelClock:
    """The clock for CUDA, which measures every ``every``-th step; 0 for none."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps = 0
        self._micro_batches = 0
        self._profile: profile | None = None

    def begin_step(self, micro_batches: int) -> None:
        self._steps += 1
        if not self._every or self._steps % self._every:
            return
        self._micro_batches = micro_batches
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._profile.start()

    def measuring(self, phase: str, micro_batch: int) -> AbstractContextManager[None]:
        return region(f"{phase} micro-batch {micro_batch}")

    def end_step(self) -> Compute | None:
        """The step's measurements, or None on all ranks alike if it was not measured; NaN if that failed."""
        if self._profile is None:
            return None
        torch.cuda.synchronize()
        self._profile.stop()
        events = self._profile.events() or ()
        self._profile = None
        seconds = kernel_seconds(events, self._micro_batches)
        if not seconds.any():
            seconds[:] = np.nan  # no access to the GPU's counters; None would be said by this rank alone
        return Compute(seconds, core_wait_seconds=0.0)


ComputeClock = ThreadClock | KernelClock


def kernel_seconds(events: Iterable[FunctionEvent], micro_batches: int) -> Seconds:
    """Seconds of compute kernels launched in each micro-batch's regions; shape (micro_batches,)."""
    events = list(events)
    on_cpu = [event for event in events if event.device_type == DeviceType.CPU]
    regions = sorted(
        (event.time_range.start, event.time_range.end, int(match[1]))
        for event in on_cpu
        if (match := _MICRO_BATCH.fullmatch(event.name))
    )
    starts = [start for start, _, _ in regions]
    launched = {event.id: event.time_range.start for event in on_cpu if _LAUNCH.match(event.name)}
    seconds = np.zeros(micro_batches)
    for event in events:
        if event.device_type != DeviceType.CUDA or event.is_user_annotation or _NOT_COMPUTE.search(event.name):
            continue
        launch = launched.get(event.id, -1.0)
        index = bisect_right(starts, launch) - 1
        if index >= 0 and launch <= regions[index][1]:
            seconds[regions[index][2]] += (event.time_range.end - event.time_range.start) * _MICROSECOND
    return seconds
