"""Seconds of many small pieces of work. Every round measures all of them, because the speed of a machine drifts.

The result is the median over rounds. Warm-up calls decide how often a round repeats each piece of work.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from wlb.runtime.clock import Clock

_SAMPLE_SECONDS, _MOST_CALLS = 2e-3, 20  # a round repeats shorter work up to 20 times

K = TypeVar("K")
Timing = NDArray[np.float64]  # seconds of one call: forward, backward


class Case(NamedTuple):
    """Work to be timed; ``backward`` takes the result of ``forward``."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]


def measure_in_turns(
    cases: Mapping[K, Case], clock: Clock, rounds: int, on_progress: Callable[[int, int], None] = lambda *counts: None
) -> dict[K, Timing]:
    """Median seconds per call of each case; ``on_progress`` receives the samples taken, and their total."""
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
    """Forward and backward seconds of every call; shape (calls, 2)."""
    if calls > 1:
        case.forward()  # work of the first call only, such as copying run lengths, waits for the GPU
        clock.get_ready(calls)
    marks = []
    for _ in range(calls):
        begin = clock.mark()
        result = case.forward()
        middle = clock.mark()
        case.backward(result)
        marks.append((begin, middle, clock.mark()))
    # Only now, because reading a GPU's clock waits for the GPU, and the next call would find it idle.
    return np.array([(clock.between(middle, begin), clock.between(end, middle)) for begin, middle, end in marks])
