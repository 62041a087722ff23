"""Seconds of many small pieces of work, measured in turns.

A machine's speed drifts. So no size is measured all at once: every round measures each of them, and the median over
rounds is kept. Calls that warm up caches and kernels say how often each piece of work is repeated in a round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from operator import sub
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

_SAMPLE_SECONDS, _MOST_CALLS = 2e-3, 20  # work shorter than this is repeated within a round, at most so often
_LAUNCH_CYCLES = 600_000  # of a GPU: about 0.3 ms, in which a CPU launches a call

K = TypeVar("K")
Timing = NDArray[np.float64]  # seconds of one call: forward, backward


class Case(NamedTuple):
    """Work to be timed; ``backward`` is given what ``forward`` returned."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]


class Clock(NamedTuple):
    """Marks moments, and tells the seconds between a later and an earlier one; profiles have its ``name``."""

    name: str
    mark: Callable[[], Any]
    between: Callable[[Any, Any], float] = sub
    get_ready: Callable[[int], object] = lambda calls: None  # for so many short calls, one after another


def clock_of(device: torch.device, threads: int = 1) -> Clock:
    """CPU time of this process, which others do not lengthen; with several threads wall time, and on a GPU events.

    A GPU that waits for work would be measured at the speed of the CPU that launches it, so it is kept busy before.
    """
    if device.type == "cuda":
        return Clock("CUDA events", _recorded, _between, lambda calls: torch.cuda._sleep(calls * _LAUNCH_CYCLES))
    return Clock("process CPU time", time.process_time) if threads == 1 else Clock("wall time", time.perf_counter)


def measure_in_turns(
    cases: Mapping[K, Case], clock: Clock, rounds: int, on_progress: Callable[[int, int], None] = lambda *counts: None
) -> dict[K, Timing]:
    """Median seconds of a call of each case; ``on_progress`` is told how many samples are taken, and of how many."""
    calls: dict[K, int] = {}
    samples: dict[K, list[Timing]] = {name: [] for name in cases}
    for number in range(1 + rounds):
        for done, (name, case) in enumerate(cases.items(), 1):
            if number:
                samples[name].append(_time(case, clock, calls[name]))
            else:
                seconds = min(_time(case, clock, 1).sum() for _ in range(2))
                calls[name] = min(_MOST_CALLS, math.ceil(_SAMPLE_SECONDS / max(seconds, 1e-9)))
            on_progress(number * len(cases) + done, (1 + rounds) * len(cases))
    return {name: np.median(np.concatenate(taken), axis=0) for name, taken in samples.items()}


def _time(case: Case, clock: Clock, calls: int) -> Timing:
    """Of every call, its seconds forward and backward; shape (calls, 2)."""
    if calls > 1:
        case.forward()  # what only a first call does, such as copying run lengths, waits for the GPU
        clock.get_ready(calls)
    marks = []
    for _ in range(calls):
        begin = clock.mark()
        result = case.forward()
        middle = clock.mark()
        case.backward(result)
        marks.append((begin, middle, clock.mark()))
    # Only now, as reading a GPU's clock waits for it, and the next call would then find it idle.
    return np.array([(clock.between(middle, begin), clock.between(end, middle)) for begin, middle, end in marks])


def _recorded() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
    return event


def _between(end: torch.cuda.Event, begin: torch.cuda.Event) -> float:
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3
