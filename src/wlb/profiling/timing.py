"""Seconds of many small pieces of work, measured in turns.

A machine's speed drifts. So no size is measured all at once: every round measures each of them, and the median over
rounds is kept. A first round warms up caches and kernels, and says how often each piece of work can be repeated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch

_MOST_ROUNDS = 25
_SAMPLE_SECONDS = 2e-3  # work shorter than this is repeated within a round
_LONG_SECONDS = 50e-3
_MOST_CALLS = 20
_LAUNCH_CYCLES = 600_000  # of a GPU: about 0.3 ms, in which a CPU launches a call

K = TypeVar("K")


@dataclass(frozen=True)
class Effort:
    """How long to measure: about ``seconds``, but at least ``fewest_rounds``."""

    seconds: float
    fewest_rounds: int


@dataclass(frozen=True)
class Case:
    """Work to be timed; ``backward`` is given what ``forward`` returned."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Timing) -> Timing:
        return Timing(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> Timing:
        return Timing(self.forward * factor, self.backward * factor)


class ProcessClock:
    """CPU seconds of this process: what other processes do costs the caches that they displace, not their time.

    Clocks mark moments and tell the seconds between two of them; ``name`` is written into the profile.
    """

    name = "process CPU time"

    def get_ready(self, case: Case, calls: int) -> None:
        """Called before so many short calls of ``case`` are timed one after another."""

    def mark(self) -> Any:
        return time.process_time()

    def seconds(self, begin: Any, end: Any) -> float:
        return float(end - begin)


class WallClock(ProcessClock):
    """Elapsed seconds, for work on several threads."""

    name = "wall time"

    def mark(self) -> float:
        return time.perf_counter()


class CudaClock(ProcessClock):
    """Seconds between events in the GPU's own queue.

    A GPU that waits for work would be measured at the speed of the CPU that launches it, so it is kept busy until the
    calls are queued.
    """

    name = "CUDA events"

    def get_ready(self, case: Case, calls: int) -> None:
        case.forward()  # what only a first call does on the CPU, such as copying run lengths, waits for the GPU
        torch.cuda._sleep(calls * _LAUNCH_CYCLES)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds * 1e-3


def measure_in_turns(
    cases: Mapping[K, Case], clock: ProcessClock, effort: Effort, on_progress: Callable[[int, int], None]
) -> dict[K, Timing]:
    """Median seconds of a call of each case, over all rounds.

    ``on_progress`` is told how many samples are taken and how many there will be.
    """
    began = time.perf_counter()
    calls: dict[K, int] = {}
    for done, (name, case) in enumerate(cases.items()):
        seconds = _time(case, clock, 1)[0].both
        if seconds < _LONG_SECONDS:  # else what the first call loads and allocates hardly counts
            seconds = _time(case, clock, 1)[0].both
        calls[name] = min(_MOST_CALLS, max(1, math.ceil(_SAMPLE_SECONDS / max(seconds, 1e-9))))
        on_progress(done + 1, len(cases) * (1 + effort.fewest_rounds))
    rounds = effort.fewest_rounds
    samples: dict[K, list[Timing]] = {name: [] for name in cases}
    done = 0
    while done < rounds:
        round_began = time.perf_counter()
        for position, (name, case) in enumerate(cases.items(), 1):
            samples[name] += _time(case, clock, calls[name])
            if position == len(cases):  # before the report, so that the last one says what there was
                now = time.perf_counter()
                affordable = int((began + effort.seconds - now) / (now - round_began))
                rounds = max(effort.fewest_rounds, min(done + 1 + affordable, _MOST_ROUNDS))
            on_progress(len(cases) * (1 + done) + position, len(cases) * (1 + rounds))
        done += 1
    return {name: _median(timings) for name, timings in samples.items()}


def _time(case: Case, clock: ProcessClock, calls: int) -> list[Timing]:
    marks = []
    if calls > 1:
        clock.get_ready(case, calls)
    for _ in range(calls):
        begin = clock.mark()
        result = case.forward()
        middle = clock.mark()
        case.backward(result)
        marks.append((begin, middle, clock.mark()))
    # Only now, as reading a GPU's clock waits for it, and the next call would then find it idle.
    return [Timing(clock.seconds(begin, middle), clock.seconds(middle, end)) for begin, middle, end in marks]


def _median(timings: list[Timing]) -> Timing:
    return Timing(median(t.forward for t in timings), median(t.backward for t in timings))
