"""Hydraulis: pipelines with different strategies side by side; a greedy deals documents among them.

Source: Hydraulis (arXiv 2412.07894) and PKU-DAIR/Hetu, ``examples/hydraulis/strategy/new_dynamic.py``. Pipelines of
different tp, pp and context-parallel size share the GPUs. A greedy deals documents, in the best of 100 random orders,
to minimise the largest "sum of costs + (pp - 1) x largest cost" of any pipeline. An integer program packs the
documents of each pipeline. Every pipeline accumulates gradients of all weights, which are summed at the end of the
step.

Assumed: at most two strategies, with context parallelism; costs are simulated for micro-batches full of like
documents. The program (HiGHS) has 50 nodes and a gap of 1% in place of half a second; with over 2,000 variables,
longest first replaces it.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.simulate.space import SearchSpace
from wlb_studies.exact import solve
from wlb_studies.policies.filling import Integers, best_fit, lightest, longest_first, power_of_two
from wlb_studies.policies.layouts import candidate_ranks
from wlb_studies.policies.plan import Group, GroupPlan, Ranks
from wlb_studies.policies.policy import Outcome, Policy, PricedStep, batches_of_draws, best_of, solver_limit
from wlb_studies.policies.pricing import StepPrice, group_seconds, price

SHUFFLES = 100  # of the documents that the greedy deals
_SHORTEST = 256  # tokens of a document that is priced; shorter ones cost in proportion
COUNTS = 16  # most numbers of micro-batches tried in a pipeline, from the fewest that the token cap allows
# Tokens of a micro-batch that keep the GPUs of a tensor-parallel group busy: of 13B (``generate_strategy_13b.py``).
BUSY = {1: 640, 2: 896, 4: 1280, 8: 1536}
# The program's bounds, in place of the published half second, which would depend on the machine: nodes of branch and
# bound, the gap at which it is solved, and documents x micro-batches beyond which half a second finds nothing better.
NODES = 50
_GAP = 0.01
_MOST_VARIABLES = 2000
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
        return self.ranks.job.layout.tp * self.ranks.job.layout.pp * self.size * self.count

    @property
    def longest(self) -> int:
        """Tokens of a micro-batch."""
        return self.ranks.capacity * self.size

    def cost(self, lengths: Integers) -> NDArray[np.float64]:
        """Seconds of a stage for each document, in the shape of ``lengths``; infinite if the document is too long."""
        return np.where(lengths <= self.longest, np.interp(lengths, *_profile(self.ranks, self.size)), np.inf)


@lru_cache(maxsize=256)
def _profile(ranks: Ranks, size: int) -> tuple[Integers, NDArray[np.float64]]:
    """Sample lengths, and for each the slowest stage's seconds per document in a micro-batch full of them."""
    longest = ranks.capacity * size
    halvings = max(0, (longest // _SHORTEST).bit_length() - 1)
    lengths = longest // 2 ** np.arange(halvings, -1, -1)
    counts = longest // lengths
    documents = np.split(np.arange(counts.sum()), np.cumsum(counts)[:-1])
    groups = [Group(slot, tuple(range(size)), tuple(d.tolist())) for slot, d in enumerate(documents)]
    profiled, _ = group_seconds(GroupPlan(np.repeat(lengths, counts), tuple(groups)), ranks)
    seconds = (profiled.forward + profiled.backward).max(axis=(0, 1)) / counts
    return np.append(0, lengths), np.append(0.0, seconds)


@dataclass(frozen=True)
class Heterogeneous:
    """A ``LayoutTrial`` in which kinds of pipelines share the GPUs."""

    kinds: tuple[Pipelines, ...]

    @property
    def layout(self) -> str:
        kinds = " + ".join(
            f"{k.count} x tp {k.ranks.job.layout.tp} cp {k.size} pp {k.ranks.job.layout.pp}" for k in self.kinds
        )
        return kinds + solver_limit(NODES)

    def step(self, lengths: Integers) -> PricedStep:
        began = time.process_time()
        dealt = iter(greedy(lengths, self.kinds))
        plans = [packed([next(dealt) for _ in range(kind.count)], lengths, kind) for kind in self.kinds]
        planning = time.process_time() - began
        prices = [price(plan, kind.ranks) for plan, kind in zip(plans, self.kinds, strict=True)]
        jobs = [kind.ranks.job for kind in self.kinds]
        exchanged = sum(
            one.exchanged_bytes * job.layout.dp * job.layout.pp * job.layout.tp
            for one, job in zip(prices, jobs, strict=True)
        )
        step = StepPrice(
            max(one.seconds for one in prices),
            exchanged / jobs[0].layout.world_size,
            max(one.memory_bytes for one in prices),
        )
        return PricedStep(step, np.concatenate([plan.trained for plan in plans]), planning)


def greedy(lengths: Integers, kinds: tuple[Pipelines, ...]) -> list[list[int]]:
    """Documents of every pipeline, kind by kind: the best of ``SHUFFLES`` greedy deals in random orders.

    Raises ``UserError`` if a pipeline gets no document; the published system does not run that.
    """
    orders = np.stack([np.random.default_rng(seed).permutation(len(lengths)) for seed in range(SHUFFLES)])
    largest, owners = _deals(orders, _columns(lengths, kinds))
    owner = owners[int(largest.argmin())]
    members = [np.flatnonzero(owner == pipeline).tolist() for pipeline in range(sum(kind.count for kind in kinds))]
    if not all(members):
        raise UserError(f"{len(lengths)} documents leave one of {len(members)} pipelines without any; give more a step")
    return members


class _Columns(NamedTuple):
    """For every pipeline: seconds of each document in a stage (infinite if too long), and its stages minus one."""

    cost: NDArray[np.float64]  # (pipelines, documents)
    depth: Integers
    longest: Integers  # micro-batch


def _columns(lengths: Integers, kinds: tuple[Pipelines, ...]) -> _Columns:
    counts = [kind.count for kind in kinds]
    cost = [kind.cost(lengths) for kind in kinds]
    return _Columns(
        np.repeat(cost, counts, axis=0),
        np.repeat([kind.ranks.job.layout.pp - 1 for kind in kinds], counts),
        np.repeat([kind.longest for kind in kinds], counts),
    )


def _deals(orders: Integers, pipelines: _Columns) -> tuple[NDArray[np.float64], Integers]:
    """For every order: the largest pipeline's seconds, and each document's pipeline, (orders, documents).

    Documents that fit only one pipeline come first. Each document goes where the largest pipeline then is smallest.
    Ties go to the last empty pipeline, or else to the first; pipelines with the longest micro-batches come first.
    """
    widest = np.argsort(-pipelines.longest, kind="stable")
    cost, depth = pipelines.cost[widest], pipelines.depth[widest]
    fits = np.isfinite(cost)
    cost = np.where(fits, cost, 0.0)
    alone_first = np.argsort(fits.sum(axis=0)[orders] > 1, axis=1, kind="stable")
    orders = np.take_along_axis(orders, alone_first, axis=1)
    trials = np.arange(len(orders))
    sums, longest = np.zeros((len(orders), len(cost))), np.zeros((len(orders), len(cost)))
    largest = np.zeros(len(orders))
    owners = np.zeros(orders.shape, np.int64)
    for documents in orders.T:
        prices = cost[:, documents].T  # (orders, pipelines)
        ends = np.maximum(sums + prices + depth * np.maximum(longest, prices), largest[:, None])
        ends[~fits[:, documents].T] = np.inf
        least = ends.min(axis=1)
        alike = ends == least[:, None]
        empty = alike & (sums == 0)
        last_empty = len(cost) - 1 - empty[:, ::-1].argmax(axis=1)
        chosen = np.where(empty.any(axis=1), last_empty, alike.argmax(axis=1))
        price = prices[trials, chosen]
        sums[trials, chosen] += price
        longest[trials, chosen] = np.maximum(longest[trials, chosen], price)
        largest = least
        owners[trials, documents] = widest[chosen]
    return largest, owners


def packed(dealt: list[list[int]], lengths: Integers, kind: Pipelines) -> GroupPlan:
    """Micro-batches of every pipeline of a kind, most expensive first."""
    cost = kind.cost(lengths)
    groups = []
    for pipeline, documents in enumerate(dealt):
        bins = _micro_batches(documents, cost, lengths, kind)
        bins.sort(key=lambda members: -float(cost[members].sum()))
        members = tuple(range(pipeline * kind.size, (pipeline + 1) * kind.size))
        groups += [Group(slot, members, tuple(of_bin)) for slot, of_bin in enumerate(bins)]
    return GroupPlan(lengths, tuple(groups))


def _micro_batches(
    documents: list[int], cost: NDArray[np.float64], lengths: Integers, kind: Pipelines
) -> list[list[int]]:
    """The micro-batches that minimise (pp - 1 + their number) x the most expensive one.

    Skips a number if no packing with it could beat the best so far.
    """
    mine, prices = lengths[documents], cost[documents]
    tokens, busy = int(mine.sum()), BUSY[min(kind.ranks.job.layout.tp, max(BUSY))] * kind.size
    least = max(1, -(-tokens // kind.longest))
    most = max(least, min(len(documents), tokens // busy))
    best: tuple[float, Integers] | None = None
    for count in range(least, min(most + 1, least + COUNTS)):
        steps = kind.ranks.job.layout.pp - 1 + count
        if best is not None and steps * max(prices.sum() / count, prices.max()) >= best[0]:
            continue
        assignment = _solved(mine, prices, count, kind.longest)
        if assignment is None:
            continue
        seconds = steps * float(np.bincount(assignment, prices).max())
        if best is None or seconds < best[0]:
            best = seconds, assignment
    if best is None:
        raise UserError(
            f"{tokens} tokens in {len(documents)} documents fit no {least} to {least + COUNTS - 1} micro-batches of "
            f"{kind.longest} tokens"
        )
    return [[documents[index] for index in np.flatnonzero(best[1] == number)] for number in np.unique(best[1]).tolist()]


def _solved(lengths: Integers, prices: NDArray[np.float64], count: int, capacity: int) -> Integers | None:
    """Each document's micro-batch, with the most expensive of ``count`` as cheap as found; None if none fit."""
    bins, left_over = lightest(longest_first(lengths), prices, count, lengths, capacity)
    if left_over:
        bins = best_fit(longest_first(lengths), lengths, capacity)
        if len(bins) > count:
            return None
    start = np.zeros(len(lengths), np.int64)
    for number, members in enumerate(bins):
        start[members] = number
    if len(lengths) * count > _MOST_VARIABLES:
        return start
    return solve(
        lengths.tolist(),
        prices.tolist(),
        count,
        capacity,
        start=start.tolist(),
        node_limit=NODES,
        relative_gap=_GAP,
    ).assignment


class HydraulisPolicy(Policy):
    """The best mixture of one strategy that holds a window and one for shorter documents."""

    def best(self, name: str, space: SearchSpace, lengths: Integers, steps: int | None = None) -> Outcome:
        draws = batches_of_draws(lengths, space, steps)
        documents = draws[0][0]
        choices = candidate_ranks(space, documents, interleaves=False)
        mixtures = [*dict.fromkeys(_mixtures(choices[:_STRATEGIES], space))]
        mixtures.sort(key=lambda kinds: _deals(np.array([longest_first(documents)]), _columns(documents, kinds))[0][0])
        return best_of(name, [Heterogeneous(kinds) for kinds in mixtures[:_TRIED]], draws, space)


def _mixtures(choices: list[Ranks], space: SearchSpace) -> Iterator[tuple[Pipelines, ...]]:
    for long in choices:
        size = power_of_two(long.needed(space.context_window))
        if size <= long.count:
            yield (Pipelines(long, size, long.count // size),)
        for short, part, share in product(choices, _SHORT, _SHARES):
            wide = Pipelines(long, size, int(share * long.count) // size)
            narrow = power_of_two(short.needed(int(part * space.context_window)))
            rest = space.gpus - wide.gpus
            count = rest // (short.job.layout.tp * short.job.layout.pp * narrow)
            if wide.count and count and (narrow, short) != (size, long):
                yield wide, Pipelines(short, narrow, count)
