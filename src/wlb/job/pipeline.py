"""The operation lists of the pipelines of a step, from the price of every micro-batch on every stage.

Prices are those of ``wlb.sharding.latency``, divided over stages by their number of blocks; the last stage also has the
head, unless it is dealt. They are rounded to whole nanoseconds before any choice, so that all machines choose the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from wlb.job.job import Job, with_seconds
from wlb.job.memory.fit import most_in_flight
from wlb.job.memory.layers import TokenMemory
from wlb.packing.arrange import arrange
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.schedules.critical_path import PipelineLoad, critical_path_lists
from wlb.schedules.operations import RankOperations
from wlb.sharding.latency import Phases, Priced, over_stages
from wlb.workload.base import in_ticks


def with_operations(job: Job, plan: StepPlan, pipeline: int | None = None) -> StepPlan:
    """``plan`` priced as it runs, dealt to data-parallel ranks, with the operation list of every pipeline rank.

    If ``pipeline`` is given, only that data-parallel rank gets lists, and the others empty ones. A plan with slices is
    dealt already, so then no other pipeline is sharded or priced, and micro-batches keep the prices of the packer.
    """
    wanted = [one for number, rank in enumerate(plan.ranks) if pipeline in (None, number) for one in rank]
    priced = wanted if job.slices_documents else plan.micro_batches
    seconds, load = pipeline_load(job, priced)
    if len(priced) == len(plan.micro_batches):
        plan = with_seconds(plan, seconds.both, seconds.forward)
        priced = plan.micro_batches
    if not job.slices_documents:
        packing = job.packing
        plan = arrange(plan, job.layout.pools, assignment=packing.assignment, order=packing.order, pipeline=job.layout)
    places = {id(micro_batch): place for place, micro_batch in enumerate(priced)}
    limits = most_in_flight(job)
    operations: list[RankOperations] = []
    for number, rank in enumerate(plan.ranks):
        if pipeline not in (None, number):
            operations.append(())
            continue
        mine = [places[id(micro_batch)] for micro_batch in rank]
        own = PipelineLoad._make(None if part is None else part[..., mine] for part in load)
        # The number of micro-batches of each sliced document, and 1 for a micro-batch of whole documents.
        first = [place for place, micro_batch in enumerate(rank) if not micro_batch.earlier]
        documents = [stop - start for start, stop in pairwise([*first, len(rank)])]
        operations.append(critical_path_lists(own, documents, job.layout.pp, limits))
    return replace(plan, operations=tuple(operations))


def pipeline_load(job: Job, micro_batches: Sequence[MicroBatch]) -> tuple[Phases, PipelineLoad]:
    """The seconds of micro-batches on all stages together, and what each stage does of them."""
    costs, shards, token = job.costs, job.sharded(micro_batches), TokenMemory(job)
    priced, longest = Priced.of(shards, costs), shards.tokens.max(axis=1)
    weights, joined = (
        (price(longest, "blocks"), price(longest, "head")) for price in (costs.weight_seconds, costs.joined_seconds)
    )
    forward, backward, weight, joins = (
        in_ticks(over_stages(*of_model, job.stage_shares, job.head_shares))
        for of_model in (*zip(*priced, strict=True), weights, joined)
    )
    tokens = np.array([one.tokens for one in micro_batches])
    sliced = np.array([one.segments[0].length if one.is_slice else 0 for one in micro_batches])
    return priced.whole, PipelineLoad(
        forward,
        backward,
        weight=np.minimum(weight, backward) if job.splits_backward else None,
        transfer=in_ticks(job.transfer_seconds(longest)),
        held=np.outer(token.stages, tokens) + np.outer(job.stage_blocks, token.slice * sliced),
        head=in_ticks(priced.head.both) if job.layout.deals_head else None,
        joined=np.minimum(joins, weight),
    )
