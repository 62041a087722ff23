"""Variable-length packing with outlier delay: Algorithm 1 of WLB-LLM (section 4.2).

The packer takes in a global batch. A document at least as long as an outlier threshold goes into the queue of the
highest threshold that it reaches. A queue releases documents in sets of N, one for every micro-batch, so all
micro-batches get outliers of about the same length. Each remaining document goes, longest first, into the lightest
micro-batch, which may grow to L_max tokens: short documents fill up what outliers leave free. A document without room
is carried over to the next step.

Three things go beyond the paper. A waiting outlier is released early if it fits beside the other outliers of the step
without making the heaviest micro-batch (``early_release = False`` is the paper's algorithm). A document that has waited
``max_delay`` steps is released alone. And a step takes in fewer fresh documents when many are carried over, so the
carry-over cannot grow without bound.

``outlier_thresholds = "auto"`` follows the documents. All candidate thresholds pack the same sample of lengths; the
best one has the smallest imbalance degree of those that keep the mean token delay below a bound. The packer tries them
once it has seen enough documents, and again whenever the distribution of lengths has moved.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import combinations
from operator import attrgetter
from typing import Any

import numpy as np

from wlb.packing.carrying import CarryingPacker, OpenMicroBatches, longest_first
from wlb.packing.packer import Pending
from wlb.packing.plan import StepPlan

DEFAULT_MAX_TOKEN_DELAY = 0.35
SCREENING_STEPS = 96  # packed with every candidate

# Thresholds tried, in context windows: about four to the octave where outliers are, coarser below.
_THRESHOLD_FRACTIONS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 5 / 16, 3 / 8, 7 / 16, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
_MICRO_BATCHES = 4  # most in a trial: thresholds that balance few micro-batches balance many
_DRIFT = 0.1  # total variation of token shares per octave of length from which thresholds are tried again

_arrived = attrgetter("arrived")


class VariableLengthPacker(CarryingPacker):
    """Micro-batches of equal workload and unequal length, none over L_max = ``max_length_factor`` windows.

    With ``outlier_thresholds = "auto"`` it keeps the latest lengths until they fill ``_SAMPLE_STEPS`` steps, and then
    tries thresholds on them.
    """

    name = "variable_length"
    _SAMPLE_STEPS = 48

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.outlier_thresholds = self.options.thresholds(self.context_window)
        self._queues: list[deque[Pending]] = [deque() for _ in self.outlier_thresholds]
        self._is_auto = self.options.outlier_thresholds == "auto"
        self._sample: list[int] = []
        self._tuned_shares: list[float] | None = None

    def _admit(self, fresh: list[Pending]) -> tuple[list[Pending], list[Pending]]:
        if self._is_auto and (thresholds := self._observe([item.length for item in fresh])) is not None:
            self.outlier_thresholds = thresholds
            self._wait(self._waiting())
        now = self._enqueued(fresh)
        older = self._carried + self._released()
        if self.options.early_release:
            older += self._released_early(now + older)
        idle = self.micro_batches - len(now) - len(older)  # empty micro-batches, if all documents wait in queues
        return now, older + self._dequeued(self._oldest_first()[: max(0, idle)])

    def _enqueued(self, items: Iterable[Pending]) -> list[Pending]:
        """Queue the outliers among ``items``; returns the others."""
        below: list[Pending] = []
        for item in items:
            level = bisect_right(self.outlier_thresholds, item[0]) - 1
            (below if level < 0 else self._queues[level]).append(item)
        return below

    def _released(self) -> list[Pending]:
        """Outliers in whole sets of N, one for every micro-batch, and those that have waited long enough."""
        released: list[Pending] = []
        for queue in self._queues:
            while len(queue) >= self.micro_batches:
                released += [queue.popleft() for _ in range(self.micro_batches)]
            while queue and self._step - queue[0].arrived >= self.max_delay:
                released.append(queue.popleft())
        return released

    def _released_early(self, items: list[Pending]) -> list[Pending]:
        """Outliers that may join ``items`` without exceeding the heaviest micro-batch or the mean."""
        waiting = self._oldest_first()
        if not waiting:
            return []
        outliers = OpenMicroBatches(self.micro_batches, self.max_tokens)
        outliers.place(longest_first(item for item in items if item[0] >= self.outlier_thresholds[0]))
        lightest = [(seconds, index) for index, seconds in enumerate(outliers.seconds)]
        heapify(lightest)
        heaviest = max(outliers.seconds)
        # Exact: the built-in sum rounds differently from Python 3.12 on, and all machines must make the same plan.
        total = math.fsum([item[1] for item in items])
        released: list[Pending] = []
        for item in waiting:
            load, index = lightest[0]
            seconds, tokens = load + item.seconds, outliers.tokens[index] + item.held
            if seconds <= max(heaviest, (total + item.seconds) / self.micro_batches) and tokens <= self.max_tokens:
                heapreplace(lightest, (seconds, index))
                outliers.tokens[index] = tokens
                heaviest = max(heaviest, seconds)
                total += item.seconds
                released.append(item)
        return self._dequeued(released)

    def _waiting(self) -> list[Pending]:
        return [item for queue in self._queues for item in queue]

    def _wait(self, items: list[Pending]) -> None:
        """Queue ``items`` by the present thresholds, oldest first; items below all thresholds are carried over."""
        self._queues = [deque() for _ in self.outlier_thresholds]
        if below := self._enqueued(sorted(items, key=_arrived)):
            self._carry(self._carried + below)

    def _oldest_first(self) -> list[Pending]:
        return sorted(self._waiting(), key=_arrived)

    def _dequeued(self, items: list[Pending]) -> list[Pending]:
        """Take ``items`` out of their queues, and return them."""
        if items:
            gone = set(map(id, items))  # not by value: a segment may have been given twice
            self._queues = [deque(item for item in queue if id(item) not in gone) for queue in self._queues]
        return items

    def state_dict(self) -> dict[str, Any]:
        tuner = {"sample": [*self._sample], "tuned_shares": self._tuned_shares}
        return {**super().state_dict(), **tuner, "outlier_thresholds": [*self.outlier_thresholds]}

    def _restore(self, state: dict[str, Any]) -> None:
        if self._is_auto:
            self._sample, self._tuned_shares = [*state["sample"]], state["tuned_shares"]
            self.outlier_thresholds = tuple(state["outlier_thresholds"])
        super()._restore(state)

    def _observe(self, lengths: Sequence[int]) -> tuple[int, ...] | None:
        """Take in the lengths of fresh documents; returns thresholds when it is time to change them."""
        self._sample += lengths
        micro_batches = min(self.micro_batches, _MICRO_BATCHES)
        step_tokens = micro_batches * self.context_window
        if sum(self._sample) < self._SAMPLE_STEPS * step_tokens:
            return None
        sample, self._sample = np.asarray(self._sample), []
        octaves = np.bincount(np.frexp(sample.astype(np.float64))[1], sample, minlength=64)
        shares = (octaves / sample.sum()).tolist()
        tuned = self._tuned_shares
        if tuned is not None and math.fsum(abs(a - b) for a, b in zip(shares, tuned, strict=True)) <= 2 * _DRIFT:
            return None
        self._tuned_shares = shares
        filling = int(np.searchsorted(np.cumsum(sample), SCREENING_STEPS * step_tokens)) + 1
        arrivals = sample[:filling].tolist()

        def wanted(thresholds: tuple[int, ...]) -> tuple[bool, float, float]:
            options = self.options.changed(outlier_thresholds=thresholds)
            packer = VariableLengthPacker(micro_batches, self.context_window, self.workload, options)
            return preference(*imbalance_and_delay(packer.plan(arrivals)), DEFAULT_MAX_TOKEN_DELAY)

        return min(threshold_sets(self.context_window), key=wanted)


def threshold_sets(context_window: int, queues: int = 2) -> Iterator[tuple[int, ...]]:
    """All sets of at most ``queues`` thresholds to try."""
    thresholds = sorted({max(1, int(fraction * context_window)) for fraction in _THRESHOLD_FRACTIONS})
    for count in range(queues + 1):
        yield from combinations(thresholds, count)


def imbalance_and_delay(plans: Sequence[StepPlan]) -> tuple[float, float]:
    """The imbalance degree of one or more steps, and the mean number of steps that a token waited."""
    delay = sum(plan.delay_token_steps for plan in plans) / sum(plan.tokens for plan in plans)
    return float(np.mean([plan.imbalance for plan in plans])), delay


def preference(imbalance: float, delay: float, max_token_delay: float) -> tuple[bool, float, float]:
    """Sort key of trials: first those within ``max_token_delay``, by imbalance, then the others, by delay."""
    return (False, imbalance, delay) if delay <= max_token_delay else (True, delay, imbalance)
