"""Levels micro-batches of documents with several costs: the sum over phases of the dearest one becomes less.

The dearest micro-batch of every phase gives a document to another one, or exchanges it for one of another, as long as
that lowers a smooth form of the sum, in which every phase's maximum is a norm of high order. So of many exchanges that
leave the maximum to another micro-batch, the one is made that is best for the rest, too. Only additions,
multiplications and square roots decide, element by element, so all machines choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from wlb.packing.levelling import Indices, Prices
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.workload.base import DocumentPrices
from wlb.workload.phases import PhasedPrices

_DOUBLINGS = 4  # the norm's order is 2**4: 16 micro-batches that are alike count as one that is 19% dearer
_GAIN = 1e-5  # of the sum: an exchange that gains less is the last
_MOST_EXCHANGES = 1 << 13  # that are compared at once: a millisecond
_ROUNDS = 16  # exchanges of every micro-batch, on average


def level_micro_batches(
    micro_batches: Sequence[MicroBatch], prices: PhasedPrices, capacity: int
) -> Sequence[MicroBatch]:
    """The same segments over as many micro-batches of at most ``capacity`` tokens, as level as ``level_phases`` can."""
    segments = [segment for micro_batch in micro_batches for segment in micro_batch.segments]
    bounds = np.cumsum([0, *(len(micro_batch.segments) for micro_batch in micro_batches)])
    parts = [np.arange(start, end) for start, end in pairwise(bounds)]
    costs = prices.costs(segments)
    levelled = level_phases(parts, costs, prices.phases.held_tokens(segments), capacity)
    if levelled is parts:
        return micro_batches
    seconds = costs.sum(axis=1)
    return [MicroBatch(tuple(segments[i] for i in part), math.fsum(seconds[part])) for part in levelled]


def level_phases(
    parts: list[Indices], costs: Prices, tokens: Indices, most_tokens: int | None, *, equal_size: bool = False
) -> list[Indices]:
    """``parts`` (indices of documents) with exchanges that lower the sum over phases of the dearest part.

    ``costs`` has shape (documents, phases), ``tokens`` (documents,). The ``parts`` given must hold at most
    ``most_tokens`` each, where that is no None, and equally many documents if ``equal_size``; then those returned do,
    none becomes empty, and the sum is at most what it was: ``parts`` where nothing was gained, and
    where there is one phase only, for which ``wlb.packing.levelling`` is.
    """
    if len(parts) < 2 or np.count_nonzero(costs.any(axis=0)) < 2:
        return parts
    levelled = _PhaseLevelling(parts, costs, tokens, most_tokens, equal_size).run()
    return levelled if slowest_sum(levelled, costs) < slowest_sum(parts, costs) else parts


def phase_imbalance(plans: Sequence[StepPlan], prices: DocumentPrices) -> dict[str, float]:
    """By phase, the dearest over the mean micro-batch, mean over steps; nothing where ``prices`` know no phases."""
    if not isinstance(prices, PhasedPrices):
        return {}
    degrees = [] if plans else [np.ones(len(prices.names))]
    for plan in plans:
        costs = np.array([prices.costs(micro_batch.segments).sum(axis=0) for micro_batch in plan.micro_batches])
        largest, mean = costs.max(axis=0), costs.mean(axis=0)
        degrees.append(np.divide(largest, mean, out=np.ones_like(mean), where=mean > 0))  # a step may have no images
    return dict(zip(prices.names, np.mean(degrees, axis=0).tolist(), strict=True))


def slowest_sum(parts: Sequence[Indices], costs: Prices) -> float:
    """The sum over phases of the dearest part."""
    return float(np.max([costs[part].sum(axis=0) for part in parts], axis=0).sum())


class _PhaseLevelling:
    def __init__(
        self, parts: list[Indices], costs: Prices, tokens: Indices, most_tokens: int | None, equal_size: bool
    ) -> None:
        self._parts, self._tokens = list(parts), tokens
        self._most_tokens, self._equal_size = most_tokens, equal_size
        means = costs.sum(axis=0) / len(parts)
        costs, self._weights = costs[:, means > 0], means[means > 0]  # a phase that no document has needs no levelling
        self._costs = costs / self._weights  # of the mean part
        self._loads = np.array([self._costs[part].sum(axis=0) for part in parts])
        self._held = np.array([tokens[part].sum() for part in parts])

    def run(self) -> list[Indices]:
        for _ in range(_ROUNDS * len(self._parts)):
            heavy = {int(part) for part in self._loads.argmax(axis=0)}
            found = min((self._best(part) for part in sorted(heavy)), key=lambda exchange: exchange[0])
            if not found[0] < (1 - _GAIN) * self._smooth_sum():
                break
            self._exchange(*found[1:])
        return self._parts

    def _smooth_sum(self) -> float:
        norms = _root(_power(self._loads).cumsum(axis=0)[-1])
        return sum(float(weight * norm) for weight, norm in zip(self._weights, norms, strict=True))

    def _best(self, heavy: int) -> tuple[float, int, int, int, int]:
        """The least sum that an exchange leaves, and the exchange: two parts, and what each gives, -1 for nothing."""
        ours = self._parts[heavy]
        lightest_first = np.argsort(self._loads.max(axis=1), kind="stable")
        others = [int(part) for part in lightest_first if part != heavy]
        gives_alone = len(ours) > 1 and not self._equal_size
        theirs = np.concatenate([np.array([-1] * gives_alone + [*self._parts[part]], np.int64) for part in others])
        owner = np.repeat(others, [gives_alone + len(self._parts[part]) for part in others])
        most = max(1, _MOST_EXCHANGES // max(1, len(ours)))
        theirs, owner = theirs[:most], owner[:most]
        sums = np.zeros((len(ours), len(theirs)))
        powers = _power(self._loads)
        for phase, weight in enumerate(self._weights):
            cost = self._costs[:, phase]
            moved = cost[ours][:, None] - np.where(theirs < 0, 0.0, cost[theirs])
            rest = powers[:, phase].cumsum()[-1] - powers[heavy, phase] - powers[owner, phase]
            after = _power(self._loads[heavy, phase] - moved) + _power(self._loads[owner, phase] + moved)
            sums += weight * _root(np.maximum(rest + after, 0.0))
        if self._most_tokens is not None:
            more = self._tokens[ours][:, None] - np.where(theirs < 0, 0, self._tokens[theirs])
            fits = (self._held[heavy] - more <= self._most_tokens) & (self._held[owner] + more <= self._most_tokens)
            sums = np.where(fits, sums, np.inf)
        if not sums.size:
            return np.inf, heavy, heavy, -1, -1
        row, column = divmod(int(sums.argmin()), len(theirs))
        return float(sums[row, column]), heavy, int(owner[column]), int(ours[row]), int(theirs[column])

    def _exchange(self, heavy: int, other: int, given: int, taken: int) -> None:
        for part, out, into in ((heavy, given, taken), (other, taken, given)):
            members = self._parts[part]
            members = members[members != out]
            self._parts[part] = np.append(members, into) if into >= 0 else members
            self._loads[part] = self._costs[self._parts[part]].cumsum(axis=0)[-1]
            self._held[part] = self._tokens[self._parts[part]].sum()


def _power(values: Prices) -> Prices:
    for _ in range(_DOUBLINGS):
        values = values * values
    return values


def _root(values: Prices) -> Prices:
    for _ in range(_DOUBLINGS):
        values = np.sqrt(values)
    return values
