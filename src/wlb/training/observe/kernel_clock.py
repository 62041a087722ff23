"""How long a rank's GPU computes on each micro-batch, collectives excluded; sampled, as looking costs time.

Every ``every``-th step runs under ``torch.profiler``. A kernel belongs to the micro-batch whose region was open on the
CPU when it was launched, whichever thread launched it: the backward's own thread does so while the training thread is
inside ``measuring``. NCCL's kernels, which mostly wait for other ranks, and copies are left out.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from wlb.attention.profiler_regions import region
from wlb.training.observe.compute_clock import Compute, Seconds

_MICRO_BATCH = re.compile(r"\w+ micro-batch (\d+)")
_LAUNCH = re.compile(r"cu(da)?\w*Launch")  # cudaLaunchKernel, cuLaunchKernelEx, cudaGraphLaunch, ...
_NOT_COMPUTE = re.compile(r"nccl|Memcpy|Memset")
_MICROSECOND = 1e-6


class Interval(Protocol):
    """Microseconds from the start of the profile."""

    start: float
    end: float


class Event(Protocol):
    """What is needed of a profiler's event; a kernel has the id of the call that launched it."""

    id: int
    name: str
    time_range: Interval
    device_type: DeviceType
    is_user_annotation: bool


class KernelClock:
    """A ``ComputeClock`` for CUDA that measures every ``every``-th step from its first one on; 0 for none."""

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


def kernel_seconds(events: Iterable[Event], micro_batches: int) -> Seconds:
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
