"""Hydraulis: pipelines of different strategies side by side, documents dealt among them greedily.

Source: Hydraulis (arXiv 2412.07894) and PKU-DAIR/Hetu, ``examples/hydraulis/strategy``. The GPUs are divided among
pipelines of different tp, pp and context-parallel size; a randomised greedy deals documents so that the largest of "sum
of costs + (pp - 1) x largest cost" is least, and each pipeline packs what it got. Every pipeline accumulates gradients
of all weights, which are summed at the end of the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.rivals.filling import Integers, best_fit, longest_first, power_of_two
from wlb.rivals.layouts import candidate_ranks
from wlb.rivals.plan import Group, GroupPlan, Ranks
from wlb.rivals.policy import Outcome, PricedStep, best_of, first_batches
from wlb.rivals.pricing import StepPrice, price_groups
from wlb.simulate.search import SearchSpace
from wlb.workload.base import DocumentPrices

RESTARTS = 4  # of the greedy, the first one unperturbed
_NOISE = 0.2  # of a document's place in the order
_SHORT = (1 / 16, 1 / 4)  # windows that pipelines for short documents hold
_SHARES = (0.25, 0.5, 0.75)  # of the GPUs, for pipelines that hold a window
_STRATEGIES = 3  # that are combined
_TRIED = 12


@dataclass(frozen=True)
class Pipelines:
    """``count`` pipelines of one strategy, each a group of ``size`` of ``ranks``."""

    ranks: Ranks
    size: int
    count: int

    @property
    def gpus(self) -> int:
        return self.ranks.job.tp * self.ranks.job.pp * self.size * self.count

    @property
    def longest(self) -> int:
        """Tokens of a micro-batch."""
        return self.ranks.capacity * self.size


@dataclass(frozen=True)
class Heterogeneous:
    """A ``Trial``: kinds of pipelines that share the GPUs."""

    kinds: tuple[Pipelines, ...]

    @property
    def layout(self) -> str:
        return " + ".join(f"{k.count} x tp {k.ranks.job.tp} cp {k.size} pp {k.ranks.job.pp}" for k in self.kinds)

    def step(self, lengths: Integers) -> PricedStep:
        began = time.perf_counter()
        dealt = greedy(lengths, self.kinds)
        planning = time.perf_counter() - began
        prices: list[StepPrice] = []
        trained: list[Integers] = []
        exchanged, first = 0.0, 0
        for kind in self.kinds:
            mine = dealt[first : first + kind.count]
            first += kind.count
            if not any(mine):
                continue
            plan = packed(mine, lengths, kind)
            prices.append(price_groups(plan, kind.ranks))
            exchanged += prices[-1].exchanged_bytes * kind.ranks.count * kind.ranks.job.pp * kind.ranks.job.tp
            trained.append(plan.trained)
        gpus = self.kinds[0].ranks.job.gpus
        price = StepPrice(
            max(price.seconds for price in prices), exchanged / gpus, max(price.memory_bytes for price in prices)
        )
        return PricedStep(price, np.concatenate(trained), planning)


def greedy(lengths: Integers, kinds: tuple[Pipelines, ...]) -> list[list[int]]:
    """Documents of every pipeline, kind after kind: the best of some greedy deals in slightly different orders."""
    pipelines = _columns(lengths, kinds)
    random = np.random.default_rng(0)
    best: tuple[float, list[list[int]]] | None = None
    for restart in range(RESTARTS):
        keys = lengths if not restart else lengths * (1 + _NOISE * (2 * random.random(len(lengths)) - 1))
        order = np.argsort(-keys, kind="stable").tolist()
        deal = _deal(order, lengths, pipelines)
        if best is None or deal[0] < best[0]:
            best = deal
    assert best is not None
    return best[1]


class _Columns(NamedTuple):
    """Of every pipeline: seconds of each document in a stage, the longest micro-batch, and stages but one."""

    cost: NDArray[np.float64]  # (pipelines, documents)
    longest: Integers
    depth: Integers


def _columns(lengths: Integers, kinds: tuple[Pipelines, ...]) -> _Columns:
    counts = [kind.count for kind in kinds]
    cost = [
        kind.ranks.job.sharding_workload.document_seconds(lengths) / kind.size / kind.ranks.job.pp for kind in kinds
    ]
    return _Columns(
        np.repeat(cost, counts, axis=0),
        np.repeat([kind.longest for kind in kinds], counts),
        np.repeat([kind.ranks.job.pp - 1 for kind in kinds], counts),
    )


def _deal(order: list[int], lengths: Integers, pipelines: _Columns) -> tuple[float, list[list[int]]]:
    cost, longest, depth = pipelines
    sums, largest = np.zeros(len(cost)), np.zeros(len(cost))
    members: list[list[int]] = [[] for _ in cost]
    for document in order:
        price = cost[:, document]
        ends = sums + price + depth * np.maximum(largest, price)
        pipeline = int(np.where(longest >= lengths[document], ends, np.inf).argmin())
        members[pipeline].append(document)
        sums[pipeline] += price[pipeline]
        largest[pipeline] = max(largest[pipeline], price[pipeline])
    return float((sums + depth * largest).max()), members


def packed(dealt: list[list[int]], lengths: Integers, kind: Pipelines) -> GroupPlan:
    """Micro-batches of every pipeline of a kind: best fit, dearest first (in place of the published program)."""
    cost = kind.ranks.job.sharding_workload.document_seconds(lengths)
    groups = []
    for pipeline, documents in enumerate(dealt):
        ordered = [documents[i] for i in longest_first(lengths[documents])]
        bins = best_fit(ordered, lengths, kind.longest)
        bins.sort(key=lambda members: -float(cost[members].sum()))
        members = tuple(range(pipeline * kind.size, (pipeline + 1) * kind.size))
        groups += [Group(slot, members, tuple(of_bin)) for slot, of_bin in enumerate(bins)]
    return GroupPlan(lengths, tuple(groups))


def best(name: str, space: SearchSpace, lengths: Integers, work_prices: DocumentPrices) -> Outcome:
    """The best mixture of a strategy that holds a window and another one for shorter documents."""
    batches = first_batches(lengths, space)
    choices = candidate_ranks(space, batches[0], pipelines=True, interleaves=False, keeps_weights=True)
    mixtures = sorted(_mixtures(choices[:_STRATEGIES], space), key=lambda kinds: _bound(batches[0], kinds))
    return best_of(name, [Heterogeneous(kinds) for kinds in mixtures[:_TRIED]], batches, space, work_prices)


def _mixtures(choices: list[Ranks], space: SearchSpace) -> Iterator[tuple[Pipelines, ...]]:
    for long in choices:
        size = power_of_two(long.needed(space.context_window))
        if size <= long.count:
            yield (Pipelines(long, size, long.count // size),)
        for short, part, share in product(choices, _SHORT, _SHARES):
            wide = Pipelines(long, size, int(share * long.count) // size)
            narrow = power_of_two(short.needed(int(part * space.context_window)))
            rest = space.gpus - wide.gpus
            count = rest // (short.job.tp * short.job.pp * narrow)
            if wide.count and count and (narrow, short) != (size, long):
                yield wide, Pipelines(short, narrow, count)


def _bound(lengths: Integers, kinds: tuple[Pipelines, ...]) -> float:
    """Seconds of a plain deal, for a first choice."""
    return _deal(longest_first(lengths), lengths, _columns(lengths, kinds))[0]
