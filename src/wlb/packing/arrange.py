"""Assigns packed micro-batches to data-parallel ranks, and orders them for the pipeline.

Neither changes what a step trains. All ranks wait for the one with the largest sum, so ``balanced`` deals the
heaviest micro-batches first, each to the rank with the smallest sum so far. A pipeline fills and empties at the pace of
its first and last micro-batches, so ``pipeline`` puts light ones at both ends and heavy ones in the middle.
``arrival`` is the usual way: micro-batches go to the ranks in turn, as torch's ``DistributedSampler`` deals them, and
run in the order in which they were packed. ``balanced`` and ``pipeline`` are rules of thumb: the more uneven the
micro-batches, the more they gain, and a single step that is balanced already may get slightly slower.

``makespan`` searches the order that the job's own schedule (``wlb.schedules``) runs fastest, and is never slower by it.
A rank takes the best of a few rules. Then, as a step takes as long as its slowest rank, that rank is searched: each
round prices, all at once, orders that rise to a peak and fall again, one for every place of the peak, and the present
order with two micro-batches swapped; the best one is taken until none is better or another rank has become the slowest.
The stages share a micro-batch's workload equally. The micro-batch says how much of it is the forward: attention and
the rest have different shares, and where workloads are balanced that difference decides. Prices are compared, sorted
and added element by element or in a fixed order, so all machines choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.lightest import into_lightest
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.schedules.layout import Layout
from wlb.schedules.timing import pipeline_makespan

Assignment = Literal["arrival", "balanced"]
Order = Literal["arrival", "pipeline", "makespan"]

_ROUNDS = 8
_ROUND_OPERATIONS = 2**19  # that a round may price: a few milliseconds, and 4 MB in each of a few arrays
_EVEN = 1e-3  # of the heaviest micro-batch: where micro-batches are this close, no order is worth a search
_GAIN = 1e-4  # of the makespan: a round that gains less is the last
_ALL_ORDERS_UP_TO = 4  # micro-batches
_FORWARD_SHARE = 1 / 3  # of a micro-batch whose forward is not known: a backward has twice its matrix products

Indices = NDArray[np.intp]
Seconds = NDArray[np.float64]


def arrange(
    plan: StepPlan,
    dp: int,
    *,
    assignment: Assignment = "balanced",
    order: Order | None = None,
    pipeline: Layout | None = None,
) -> StepPlan:
    """Deal the micro-batches of ``plan`` to ``dp`` ranks, the same number to each, and order each rank's.

    ``order`` is by default "makespan" where the ``pipeline`` that they run on is given, and "pipeline" where it is not.
    ``order = "makespan"`` asks for it; the other orders do not look at it.
    Raises ``UserError`` where the number of micro-batches is not a multiple of ``dp``.
    """
    micro_batches = plan.micro_batches
    if any(micro_batch.ranks for micro_batch in micro_batches):
        return plan  # ranks wait for each other in a circle, were they to keep to different orders
    if dp < 1 or len(micro_batches) % dp:
        raise UserError(f"{len(micro_batches)} micro-batches cannot be dealt evenly to {dp} data-parallel ranks")
    ranks = [list(micro_batches[rank::dp]) for rank in range(dp)]
    if assignment == "balanced":
        ranks = min(_balanced(micro_batches, dp), ranks, key=_largest_sum)  # greedy dealing may be the worse one
    order = order or ("pipeline" if pipeline is None else "makespan")
    if order == "pipeline":
        ranks = [_heavy_in_the_middle(rank) for rank in ranks]
    elif order == "makespan":
        if pipeline is None:
            raise UserError("order 'makespan' needs the pipeline that micro-batches are ordered for; give pipeline")
        ranks = _in_fastest_order(ranks, pipeline)
    return replace(plan, ranks=tuple(tuple(rank) for rank in ranks))


def _balanced(micro_batches: Sequence[MicroBatch], dp: int) -> list[list[MicroBatch]]:
    """Heaviest first, each to the lightest of the ranks that have a place left."""
    ranks: list[list[MicroBatch]] = [[] for _ in range(dp)]
    falling = sorted(micro_batches, key=lambda m: m.workload, reverse=True)
    places = [len(falling) // dp] * dp
    owners, _ = into_lightest([1] * len(falling), [m.workload for m in falling], [0.0] * dp, places)
    for micro_batch, rank in zip(falling, owners, strict=True):
        ranks[rank].append(micro_batch)
    return ranks


def _largest_sum(ranks: list[list[MicroBatch]]) -> float:
    # Exact, as the built-in sum rounds differently from Python 3.12 on, and machines must choose alike.
    return max(math.fsum(micro_batch.workload for micro_batch in rank) for rank in ranks)


def _heavy_in_the_middle(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Rising, then falling: the lightest first, the second lightest last, and so on inwards."""
    rising = sorted(micro_batches, key=lambda m: m.workload)
    return rising[::2] + rising[1::2][::-1]


def _in_fastest_order(ranks: Sequence[Sequence[MicroBatch]], pipeline: Layout) -> list[list[MicroBatch]]:
    """``ranks``, of equally many micro-batches, each in the order in which the pipeline is fastest, as far as tried.

    No rank is slower than as given, rising, falling, or rising and then falling, up to 0.1%. Without a pipeline ranks
    gather weights together in every micro-batch, so micro-batches that cost alike meet, the heaviest last, which hides
    most of reducing gradients.
    """
    if pipeline.pp == 1:
        return [sorted(rank, key=lambda micro_batch: micro_batch.workload) for rank in ranks]
    seconds = _phase_seconds(ranks)
    if np.all(np.ptp(seconds, axis=2) <= _EVEN * seconds.max(axis=2)):
        return [list(rank) for rank in ranks]
    orders, makespans = _best_rule(seconds, pipeline)
    for _ in range(_ROUNDS):
        slowest = int(makespans.argmax())
        order, makespan = _best_of_round(seconds[:, slowest], orders[slowest], pipeline)
        if makespan >= (1 - _GAIN) * makespans[slowest]:
            break
        orders[slowest], makespans[slowest] = order, makespan
    return [[rank[index] for index in order] for rank, order in zip(ranks, orders.tolist(), strict=True)]


def _phase_seconds(ranks: Sequence[Sequence[MicroBatch]]) -> Seconds:
    """Forward and backward of every micro-batch, shape (2, ranks, micro-batches), which add up to its workload."""
    both = np.array([[micro_batch.workload for micro_batch in rank] for rank in ranks])
    known = [[_FORWARD_SHARE * one.workload if one.forward is None else one.forward for one in rank] for rank in ranks]
    return np.stack([np.array(known), both - np.array(known)])


def _best_rule(seconds: Seconds, pipeline: Layout) -> tuple[Indices, Seconds]:
    """Orders (ranks, micro-batches), the first of the best for each rank, and their makespans (ranks,)."""
    _, ranks, micro_batches = seconds.shape
    as_given = np.broadcast_to(np.arange(micro_batches), (ranks, micro_batches))
    falling = _falling(seconds)
    rising = falling[:, ::-1]
    rising_then_falling = np.concatenate([rising[:, ::2], falling[:, micro_batches % 2 :: 2]], axis=1)
    orders = np.stack([as_given, rising_then_falling, falling, rising], axis=1)
    makespans = _makespans(np.take_along_axis(seconds[:, :, None], orders[None], axis=3), pipeline)
    best = makespans.argmin(axis=1)
    rows = np.arange(ranks)
    return orders[rows, best], makespans[rows, best]


def _best_of_round(seconds: Seconds, order: Indices, pipeline: Layout) -> tuple[Indices, float]:
    """The best order near ``order`` or with a peak, and its makespan; ``seconds`` has shape (2, micro-batches)."""
    count = len(order)
    most = max(2, _ROUND_OPERATIONS // (2 * pipeline.stages * count))
    peaks = _falling(seconds)[_peaks(count, most // 2)]
    orders = np.concatenate([peaks, order[_swaps(count, most - len(peaks))]])
    makespans = _makespans(seconds[:, orders], pipeline)
    best = int(makespans.argmin())
    return orders[best], float(makespans[best])


def _makespans(seconds: Seconds, pipeline: Layout) -> Seconds:
    """Seconds of shape (...) from forward and backward, all stages, (2, ..., micro-batches)."""
    shape = (*seconds.shape[:-1], pipeline.stages, seconds.shape[-1])
    forward, backward = np.broadcast_to(seconds[..., None, :] / pipeline.stages, shape)
    return pipeline_makespan(pipeline.schedule, forward, backward, pipeline.virtual_pp)


def _falling(seconds: Seconds) -> Indices:
    """Micro-batches from the heaviest to the lightest, forward and backward together."""
    return np.argsort(-seconds.sum(axis=0), axis=-1, kind="stable")


@lru_cache(maxsize=16)
def _peaks(count: int, most: int) -> Indices:
    """At most ``most`` orders, as places in the falling order: all there are, or with the peak evenly spread."""
    if count <= _ALL_ORDERS_UP_TO:
        return np.array(list(permutations(range(count)))[:most])
    places = np.unique(np.linspace(-0.25, count - 0.75, min(2 * count, most)))
    by_distance = np.argsort(np.abs(np.arange(count) - places[:, None]), axis=1, kind="stable")
    return np.argsort(by_distance, axis=1)  # the heavier, the closer to the place


@lru_cache(maxsize=16)
def _swaps(count: int, most: int) -> Indices:
    """At most ``most`` orders of ``count`` in which two have changed places, neighbours before distant ones."""
    first, second = np.triu_indices(count, 1)
    nearest = np.argsort(second - first, kind="stable")[:most]
    first, second = first[nearest], second[nearest]
    orders, rows = np.tile(np.arange(count), (len(nearest), 1)), np.arange(len(nearest))
    orders[rows, first], orders[rows, second] = second, first
    return orders
