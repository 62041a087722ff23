"""Seconds of many small pieces of work, measured in turns: as a machine's speed drifts, every round measures each.

The median over rounds is kept. Calls that warm up say how often each piece of work is repeated in a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from wlb.runtime.clock import Clock

_SAMPLE_SECONDS, _MOST_CALLS = 2e-3, 20  # work shorter than this is repeated within a round, at most so often

K = TypeVar("K")
Timing = NDArray[np.float64]  # seconds of one call: forward, backward


class Case(NamedTuple):
    """Work to be timed; ``backward`` is given what ``forward`` returned."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]


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
