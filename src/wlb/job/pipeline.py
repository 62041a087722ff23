"""The operation lists of the pipelines of a step, from the price of every micro-batch on every stage.

Prices are those of ``wlb.sharding.latency``, divided over stages by their number of blocks; the last stage also has the
head, unless it is dealt. They are rounded to whole nanoseconds before any choice, so that all machines choose the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from wlb.job.job import Job, with_seconds
from wlb.job.memory.layers import head_share, kept_share, kept_tokens, window_tokens
from wlb.packing.arrange import arrange
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.schedules.critical_path import PipelineLoad, critical_path_lists
from wlb.schedules.operations import BACKWARD, FORWARD, RankOperations
from wlb.sharding.latency import Priced, over_stages
from wlb.workload.base import TICKS

_THOUSANDTHS = 1000


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
    limits = [most_in_flight(job)] * job.layout.pp
    operations: list[RankOperations] = []
    for number, rank in enumerate(plan.ranks):
        mine = pipeline in (None, number)
        load = loads.of([places[id(micro_batch)] for micro_batch in rank]) if mine else None
        operations.append(() if load is None else critical_path_lists(load, _slices(rank), job.layout.pp, limits))
    return replace(plan, operations=tuple(operations))


def most_in_flight(job: Job) -> int:
    """Memory that each pipeline rank may hold at once, in thousandths of the activations of a token in a block.

    The limit is the memory of the fullest rank in the named schedule, with micro-batches of ``job.in_flight_length``
    tokens; plus a document of a context window, because all its slices are held at once, and lists without slices need
    that room to be no slower than the named schedule; plus the keys and values kept of slices.
    """
    leaves, most = _leaves(job), 0
    for of_rank in job.layout.operations(job.rank_micro_batches):
        changes = [leaves[one.stage] * ((one.kind == FORWARD) - (one.kind == BACKWARD)) for one in of_rank]
        most = max(most, max(accumulate(changes)) * job.in_flight_length)
    most += _THOUSANDTHS * window_tokens(job)
    return most + int(_kept(job) * kept_tokens(job, most / _THOUSANDTHS))


def _leaves(job: Job) -> list[int]:
    """Activations of a token in each stage, in thousandths of those of a block, with those of a head on the last."""
    leaves: list[int] = (
        np.rint(_THOUSANDTHS * (job.stage_blocks + head_share(job) * job.head_shares)).astype(int).tolist()
    )
    return leaves


def _kept(job: Job) -> int:
    """Keys and values kept of a token in a slice, in thousandths of its other activations in a block."""
    return round(_THOUSANDTHS * kept_share(job))


class PipelineLoads:
    """The operation seconds of micro-batches on every stage, and on all of them: ``both`` and ``forward``."""

    def __init__(self, job: Job, micro_batches: Sequence[MicroBatch]) -> None:
        costs, shards = job.costs, job.sharded(micro_batches)
        priced, longest = Priced.of(shards, costs), shards.tokens.max(axis=1)
        self.both, self.forward = priced.whole.both, priced.whole.forward
        weights = costs.weight_seconds(longest, "blocks"), costs.weight_seconds(longest, "head")
        self._forward, self._backward, weight = (
            np.rint(TICKS * over_stages(*of_model, job.stage_shares, job.head_shares)).astype(np.int64)
            for of_model in (*zip(*priced, strict=True), weights)
        )
        self._weight = np.minimum(weight, self._backward) if job.splits_backward else None
        self._head = np.rint(TICKS * priced.head.both).astype(np.int64) if job.layout.deals_head else None
        self._transfer = np.rint(TICKS * job.transfer_seconds(longest)).astype(np.int64)
        tokens = np.array([one.tokens for one in micro_batches])
        sliced = np.array([one.segments[0].length if one.is_slice else 0 for one in micro_batches])
        self._held = np.outer(_leaves(job), tokens) + np.outer(job.stage_blocks, _kept(job) * sliced)

    def of(self, places: Sequence[int]) -> PipelineLoad:
        """The load of the micro-batches at ``places``, in this order."""
        forward, backward, held = (table[:, places] for table in (self._forward, self._backward, self._held))
        weight = None if self._weight is None else self._weight[:, places]
        head = None if self._head is None else self._head[places]
        return PipelineLoad(forward, backward, weight, self._transfer[places], held, head)


def _slices(micro_batches: Sequence[MicroBatch]) -> list[int]:
    """The number of micro-batches of each sliced document, and 1 for a micro-batch of whole documents."""
    counts: list[int] = []
    for micro_batch in micro_batches:
        if micro_batch.earlier:
            counts[-1] += 1
        else:
            counts.append(1)
    return counts
