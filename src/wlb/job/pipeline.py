"""The operation lists of the pipelines of a step, from the price of every micro-batch on every stage.

Prices are those of ``wlb.sharding.latency``, divided over stages by their number of blocks; the last stage also has the
head, unless it is dealt. They are rounded to whole nanoseconds before any choice, so that all machines choose the same.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wlb.job.job import Job, with_seconds
from wlb.job.memory.fit import most_in_flight
from wlb.job.memory.layers import TokenMemory
from wlb.packing.arrange import arrange
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.schedules.critical_path import PipelineLoad, critical_path_lists
from wlb.schedules.operations import RankOperations
from wlb.sharding.latency import Priced, over_stages
from wlb.workload.base import in_ticks


def with_operations(job: Job, plan: StepPlan, pipeline: int | None = None) -> StepPlan:
    """``plan`` priced as it runs, dealt to data-parallel ranks, with the operation list of every pipeline rank.

    If ``pipeline`` is given, only that data-parallel rank gets lists, and the others empty ones. A plan with slices is
    dealt already, so then no other pipeline is sharded or priced, and micro-batches keep the prices of the packer.
    """
    wanted = [one for number, rank in enumerate(plan.ranks) if pipeline in (None, number) for one in rank]
    priced = wanted if job.slices_documents else plan.micro_batches
    loads = PipelineLoads(job, priced)
    if len(priced) == len(plan.micro_batches):
        plan = with_seconds(plan, loads.both, loads.forward)
        priced = plan.micro_batches
    if not job.slices_documents:
        packing = job.packing
        plan = arrange(plan, job.layout.pools, assignment=packing.assignment, order=packing.order, pipeline=job.layout)
    places = {id(micro_batch): place for place, micro_batch in enumerate(priced)}
    limits = most_in_flight(job)
    operations: list[RankOperations] = []
    for number, rank in enumerate(plan.ranks):
        mine = pipeline in (None, number)
        load = loads.of([places[id(micro_batch)] for micro_batch in rank]) if mine else None
        operations.append(() if load is None else critical_path_lists(load, _slices(rank), job.layout.pp, limits))
    return replace(plan, operations=tuple(operations))


class PipelineLoads:
    """The operation seconds of micro-batches on every stage, and on all of them: ``both`` and ``forward``."""

    def __init__(self, job: Job, micro_batches: Sequence[MicroBatch]) -> None:
        costs, shards = job.costs, job.sharded(micro_batches)
        priced, longest = Priced.of(shards, costs), shards.tokens.max(axis=1)
        self.both, self.forward = priced.whole.both, priced.whole.forward
        weights, joined = (
            (price(longest, "blocks"), price(longest, "head")) for price in (costs.weight_seconds, costs.joined_seconds)
        )
        self._forward, self._backward, weight, joins = (
            in_ticks(over_stages(*of_model, job.stage_shares, job.head_shares))
            for of_model in (*zip(*priced, strict=True), weights, joined)
        )
        self._weight = np.minimum(weight, self._backward) if job.splits_backward else None
        self._joined = np.minimum(joins, weight)
        self._head = in_ticks(priced.head.both) if job.layout.deals_head else None
        self._transfer = in_ticks(job.transfer_seconds(longest))
        tokens = np.array([one.tokens for one in micro_batches])
        sliced = np.array([one.segments[0].length if one.is_slice else 0 for one in micro_batches])
        token = TokenMemory(job)
        self._held = np.outer(token.stages, tokens) + np.outer(job.stage_blocks, token.slice * sliced)

    def of(self, places: Sequence[int]) -> PipelineLoad:
        """The load of the micro-batches at ``places``, in this order."""
        tables = self._forward, self._backward, self._held, self._joined
        forward, backward, held, joined = (table[:, places] for table in tables)
        weight = None if self._weight is None else self._weight[:, places]
        head = None if self._head is None else self._head[places]
        return PipelineLoad(forward, backward, weight, self._transfer[places], held, head, joined)


def _slices(micro_batches: Sequence[MicroBatch]) -> list[int]:
    """The number of micro-batches of each sliced document, and 1 for a micro-batch of whole documents."""
    counts: list[int] = []
    for micro_batch in micro_batches:
        if micro_batch.earlier:
            counts[-1] += 1
        else:
            counts.append(1)
    return counts
