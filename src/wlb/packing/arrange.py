"""Assigns packed micro-batches to data-parallel ranks, and orders them for the pipeline.

Neither changes what a step trains. All ranks wait for the rank with the most work, so the assignment ``balanced`` deals
the heaviest micro-batches first, each to the rank with the least work so far. ``arrival`` deals micro-batches to the
ranks in turn, as torch's ``DistributedSampler`` does.

The order ``arrival`` runs micro-batches as they were packed. ``pipeline`` runs light micro-batches first and last, to
shorten pipeline bubbles, and heavy ones in the middle. Both are rules of thumb: they gain more, the more uneven the
micro-batches are, and may slow down a step that is already balanced.

``fastest`` searches for the order that the job's own schedule (``wlb.schedules``) runs fastest. Each rank starts with
the best of a few rules. A step takes as long as its slowest rank, so that rank is then improved: each round prices
orders that rise to a peak and fall again, for every place of the peak, and the present order with two micro-batches
swapped. The best order is kept until none is better or another rank has become the slowest.

Stages are taken to share the workload of a micro-batch equally. Each micro-batch says how much of it is the forward:
attention and the rest have different forward shares, which matters where workloads are equal. Prices are compared,
sorted and added in a fixed order, so all machines choose the same.
"""

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
from wlb.packing.exchanges import members_of
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.schedules.layout import Layout
from wlb.schedules.timing import pipeline_makespan
from wlb.workload.flops import FORWARD_SHARE

Assignment = Literal["arrival", "balanced"]
Order = Literal["arrival", "pipeline", "fastest"]

_ROUNDS = 8
_ROUND_OPERATIONS = 2**19  # priced in a round: a few milliseconds, and 4 MB in each of a few arrays
_EVEN = 1e-3  # of the heaviest micro-batch: if micro-batches differ by less, no order is worth a search
_GAIN = 1e-4  # of the makespan: the search stops after a round that gains less
_ALL_ORDERS_UP_TO = 4  # micro-batches

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
    """Deal the micro-batches of ``plan`` to ``dp`` ranks, the same number to each, and order them on each rank.

    ``order`` defaults to "fastest" if ``pipeline``, the layout to run on, is given, and to "pipeline" otherwise. Only
    "fastest" needs ``pipeline``.
    Raises ``UserError`` if the number of micro-batches is not a multiple of ``dp``.
    """
    micro_batches = plan.micro_batches
    if any(micro_batch.ranks for micro_batch in micro_batches):
        return plan  # ranks that ran a level step in different orders would deadlock
    if dp < 1 or len(micro_batches) % dp:
        raise UserError(f"{len(micro_batches)} micro-batches cannot be dealt evenly to {dp} data-parallel ranks")
    ranks = [list(micro_batches[rank::dp]) for rank in range(dp)]
    if assignment == "balanced":
        ranks = min(_balanced(micro_batches, dp), ranks, key=_largest_sum)  # greedy dealing may be worse
    order = order or ("pipeline" if pipeline is None else "fastest")
    if order == "pipeline":
        ranks = [_heavy_in_the_middle(rank) for rank in ranks]
    elif order == "fastest":
        if pipeline is None:
            raise UserError("order 'fastest' needs the layout that the micro-batches run on; give pipeline")
        ranks = _in_fastest_order(ranks, pipeline)
    return replace(plan, ranks=tuple(tuple(rank) for rank in ranks))


def _balanced(micro_batches: Sequence[MicroBatch], dp: int) -> list[list[MicroBatch]]:
    """Heaviest first, each to the lightest rank that has a place left."""
    falling = sorted(micro_batches, key=lambda m: m.workload, reverse=True)
    places = [len(falling) // dp] * dp
    owners = into_lightest([1] * len(falling), [m.workload for m in falling], [0.0] * dp, places)
    return [[falling[place] for place in mine] for mine in members_of(np.arange(len(falling)), owners, dp)]


def _largest_sum(ranks: list[list[MicroBatch]]) -> float:
    # Exact: the built-in sum rounds differently from Python 3.12 on, and all machines must choose the same.
    return max(math.fsum(micro_batch.workload for micro_batch in rank) for rank in ranks)


def _heavy_in_the_middle(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Rising, then falling: the lightest first, the second lightest last, and so on inwards."""
    rising = sorted(micro_batches, key=lambda m: m.workload)
    return rising[::2] + rising[1::2][::-1]


def _in_fastest_order(ranks: Sequence[Sequence[MicroBatch]], pipeline: Layout) -> list[list[MicroBatch]]:
    """Order the micro-batches of each rank for the pipeline; all ``ranks`` have the same number of micro-batches.

    No rank becomes slower, by more than 0.1%, than in the given, a rising, a falling, or a rising-then-falling order.
    Without a pipeline, ranks gather weights together in every micro-batch, so every rank runs its micro-batches by
    rising cost: similar ones then run together, and the heaviest, last one hides most of the gradient reduction.
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
    """Forward and backward of every micro-batch, shape (2, ranks, micro-batches); they add up to its workload."""
    both = np.array([[micro_batch.workload for micro_batch in rank] for rank in ranks])
    known = [[FORWARD_SHARE * one.workload if one.forward is None else one.forward for one in rank] for rank in ranks]
    return np.stack([np.array(known), both - np.array(known)])


def _best_rule(seconds: Seconds, pipeline: Layout) -> tuple[Indices, Seconds]:
    """The best order by rule for each rank, shape (ranks, micro-batches), and its makespan, shape (ranks,)."""
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
    """The best order with a swap or with a peak, and its makespan; ``seconds`` has shape (2, micro-batches)."""
    count = len(order)
    most = max(2, _ROUND_OPERATIONS // (2 * pipeline.stages * count))
    peaks = _falling(seconds)[_peaks(count, most // 2)]
    orders = np.concatenate([peaks, order[_swaps(count, most - len(peaks))]])
    makespans = _makespans(seconds[:, orders], pipeline)
    best = int(makespans.argmin())
    return orders[best], float(makespans[best])


def _makespans(seconds: Seconds, pipeline: Layout) -> Seconds:
    """Makespans, shape (...), from seconds of forward and backward over all stages, (2, ..., micro-batches)."""
    shape = (*seconds.shape[:-1], pipeline.stages, seconds.shape[-1])
    forward, backward = np.broadcast_to(seconds[..., None, :] / pipeline.stages, shape)
    return pipeline_makespan(pipeline.schedule, forward, backward, pipeline.virtual_pp)


def _falling(seconds: Seconds) -> Indices:
    """Micro-batches from the heaviest to the lightest, by forward plus backward."""
    return np.argsort(-seconds.sum(axis=0), axis=-1, kind="stable")


@lru_cache(maxsize=16)
def _peaks(count: int, most: int) -> Indices:
    """At most ``most`` orders, as places in the falling order: all of them, or peaks at evenly spread places."""
    if count <= _ALL_ORDERS_UP_TO:
        return np.array(list(permutations(range(count)))[:most])
    places = np.unique(np.linspace(-0.25, count - 0.75, min(2 * count, most)))
    by_distance = np.argsort(np.abs(np.arange(count) - places[:, None]), axis=1, kind="stable")
    return np.argsort(by_distance, axis=1)  # heavier ones are closer to the peak


@lru_cache(maxsize=16)
def _swaps(count: int, most: int) -> Indices:
    """At most ``most`` orders of ``count`` with two places swapped, neighbours before distant ones."""
    first, second = np.triu_indices(count, 1)
    nearest = np.argsort(second - first, kind="stable")[:most]
    first, second = first[nearest], second[nearest]
    orders, rows = np.tile(np.arange(count), (len(nearest), 1)), np.arange(len(nearest))
    orders[rows, first], orders[rows, second] = second, first
    return orders
