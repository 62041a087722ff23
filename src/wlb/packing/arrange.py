"""Assigns packed micro-batches to data-parallel ranks, and orders them for the pipeline.

Neither changes what a step trains. All ranks wait for the one with the largest sum, so ``balanced`` deals the
heaviest micro-batches first, each to the rank with the smallest sum so far. A pipeline fills and empties at the pace of
its first and last micro-batches, so ``pipeline`` puts light ones at both ends and heavy ones in the middle.
``arrival`` is the usual way: micro-batches go to the ranks in turn, as torch's ``DistributedSampler`` deals them, and
run in the order in which they were packed. ``balanced`` and ``pipeline`` are rules of thumb: the more uneven the
micro-batches, the more they gain, and a single step that is balanced already may get slightly slower. ``makespan``
prices orders by the job's own pipeline schedule and is never slower by it (``wlb.packing.pipeline_order``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from wlb.errors import UserError
from wlb.packing.pipeline_order import Pipeline, in_fastest_order
from wlb.packing.plan import MicroBatch, StepPlan

Assignment = Literal["arrival", "balanced"]
Order = Literal["arrival", "pipeline", "makespan"]


def arrange(
    plan: StepPlan,
    dp: int,
    *,
    assignment: Assignment = "balanced",
    order: Order | None = None,
    pipeline: Pipeline | None = None,
) -> StepPlan:
    """Deal the micro-batches of ``plan`` to ``dp`` ranks, the same number to each, and order each rank's.

    ``order`` is by default "makespan" where the ``pipeline`` that they run on is given, and "pipeline" where it is not.
    ``order = "makespan"`` asks for it; the other orders do not look at it.
    Raises ``UserError`` where the number of micro-batches is not a multiple of ``dp``.
    """
    micro_batches = plan.micro_batches
    order = order or ("pipeline" if pipeline is None else "makespan")
    if dp < 1 or len(micro_batches) % dp:
        raise UserError(f"{len(micro_batches)} micro-batches cannot be dealt evenly to {dp} data-parallel ranks")
    ranks = [list(micro_batches[rank::dp]) for rank in range(dp)]
    if assignment == "balanced":
        ranks = min(_balanced(micro_batches, dp), ranks, key=_largest_sum)  # greedy dealing may be the worse one
    if order == "pipeline":
        ranks = [_heavy_in_the_middle(rank) for rank in ranks]
    elif order == "makespan":
        if pipeline is None:
            raise UserError("order 'makespan' needs the pipeline that micro-batches are ordered for; give pipeline")
        ranks = in_fastest_order(ranks, pipeline)
    return replace(plan, ranks=tuple(tuple(rank) for rank in ranks))


def _balanced(micro_batches: Sequence[MicroBatch], dp: int) -> list[list[MicroBatch]]:
    """Heaviest first, each to the lightest of the ranks that have a place left."""
    per_rank = len(micro_batches) // dp
    ranks: list[list[MicroBatch]] = [[] for _ in range(dp)]
    sums = [0.0] * dp
    for micro_batch in sorted(micro_batches, key=lambda m: m.workload, reverse=True):
        rank = min((r for r in range(dp) if len(ranks[r]) < per_rank), key=sums.__getitem__)
        ranks[rank].append(micro_batch)
        sums[rank] += micro_batch.workload
    return ranks


def _largest_sum(ranks: list[list[MicroBatch]]) -> float:
    # Exact, as the built-in sum rounds differently from Python 3.12 on, and machines must choose alike.
    return max(math.fsum(micro_batch.workload for micro_batch in rank) for rank in ranks)


def _heavy_in_the_middle(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Rising, then falling: the lightest first, the second lightest last, and so on inwards."""
    rising = sorted(micro_batches, key=lambda m: m.workload)
    return rising[::2] + rising[1::2][::-1]
