"""The price of a rival's plan, from the same workload, links, FSDP and pipeline as every simulated job.

The simulator itself (``wlb.simulate``) shards and prices groups, as context-parallel groups of their size on as many
nodes. Moved attention is priced piece by piece; ``exchange`` prices its traffic and what hides it. The seconds of every
rank in every micro-batch give the step: ranks that share a micro-batch start it together, pipelines run their schedule,
and a step ends when the slowest rank has reduced gradients and updated weights.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.job.config import ShardingConfig
from wlb.job.job import Job
from wlb.job.memory.walk import predict_memory
from wlb.schedules.operations import FORWARD, RankOperations
from wlb.schedules.timing import in_dependency_order
from wlb.sharding import price_shards
from wlb.sharding.pieces import Shards
from wlb.simulate.costs import JobCosts
from wlb.simulate.step import Steps
from wlb.workload.base import Phase
from wlb_studies.policies.exchange import all_to_all_of_heads, kv_bytes, moved_bytes, moving_seconds, shown_seconds
from wlb_studies.policies.plan import GroupPlan, MovedPlan, Plan, Ranks

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StepPrice:
    """Seconds of a step, bytes that the mean GPU receives in it (without FSDP and tp), and its peak memory."""

    seconds: float
    exchanged_bytes: float
    memory_bytes: float


class SlotSeconds(NamedTuple):
    """Seconds of every rank's stages in every slot, shape (ranks, stages, slots), and its tokens, (ranks, slots).

    For ``moving`` of these seconds its links are busy with attention traffic: in the forward, or in the backward if
    that moves more. Weights are gathered before each.
    """

    forward: Array
    backward: Array
    tokens: Array
    moving: ArrayLike = 0.0


def price(plan: Plan, ranks: Ranks) -> StepPrice:
    """The step of ``plan``."""
    if isinstance(plan, GroupPlan):
        seconds, exchanged = group_seconds(plan, ranks)
        step = step_seconds(seconds, begun_together(plan, ranks), ranks, fetched=plan.fetches_weights)
        # Sequence parallelism over heads holds whole sequences of few heads, not a part of each sequence of all heads.
        largest = 1 if plan.exchange == "heads" else max(len(group.ranks) for group in plan.groups)
        exchanged /= ranks.count * ranks.job.layout.pp
    else:
        seconds, exchanged = moved_seconds(plan, ranks)
        in_lockstep = plan.ranks > ranks.count
        step = _lockstep_seconds(seconds, ranks) if in_lockstep else step_seconds(seconds, plan.pools, ranks)
        largest = ranks.count if in_lockstep else plan.pool_size
    return StepPrice(step, exchanged, peak_memory(ranks, float(seconds.tokens.max()), largest))


def begun_together(plan: GroupPlan, ranks: Ranks) -> NDArray[np.int64]:
    """Equal numbers for ranks that start a slot together, shape (ranks, slots): a group, or all at a barrier."""
    began = np.tile(np.arange(ranks.count)[:, None], plan.slots)
    for group in plan.groups:
        began[list(group.ranks), group.slot] = group.ranks[0]
    began[:, sorted(plan.barriers)] = 0
    return began


def group_seconds(plan: GroupPlan, ranks: Ranks) -> tuple[SlotSeconds, float]:
    """Seconds of all ranks and bytes that they receive, over all layers, for one tensor-parallel share per rank."""
    job, by_kind = ranks.job, defaultdict(list)
    for group in plan.groups:
        on_nodes = {rank // job.ranks_per_node for rank in group.ranks}
        by_kind[len(group.ranks), len(on_nodes)].append(group)
    forward = np.zeros((ranks.count, job.layout.stages, plan.slots))
    backward, moving = np.zeros_like(forward), np.zeros_like(forward)
    exchanged = 0.0
    for (size, nodes), groups in by_kind.items():
        lengths = [plan.lengths[list(group.documents)].tolist() for group in groups]
        of_stages = _priced(lengths, size, nodes, job, plan)
        exchanged += of_stages.received_bytes
        for index, group in enumerate(groups):
            members = list(group.ranks)
            forward[members, :, group.slot] += of_stages.forward[:, index]
            backward[members, :, group.slot] += of_stages.backward[:, index]
            moving[members, :, group.slot] += of_stages.moving[:, index]
    return SlotSeconds(forward, backward, plan.tokens_per_rank(ranks.count), moving), exchanged


def moved_seconds(plan: MovedPlan, ranks: Ranks) -> tuple[SlotSeconds, float]:
    """Seconds of all ranks after ranks of a pool waited for each other, and bytes that the mean GPU receives."""
    job, costs = ranks.job, own_costs(ranks.job)
    tokens = plan.by_lane((plan.home.stop - plan.home.start).astype(np.float64), plan.home)
    last_keys = np.zeros(plan.pools.size, np.int64)
    np.maximum.at(last_keys, plan.work.lane, plan.work.stop)
    longest = plan.of_ranks(last_keys)
    attention = {
        direction: plan.by_lane(
            plan.work.share * costs.rank.piece_seconds(plan.work.start, plan.work.stop, direction), plan.work
        )
        + costs.rank.drain_seconds(longest, direction)
        for direction in _DIRECTIONS
    }
    steps = _alone(costs, tokens.ravel(), attention["forward"].ravel(), attention["backward"].ravel())
    moved = moved_bytes(plan, job)
    share, last = costs.job.stage_shares[None, :, None], np.eye(job.layout.stages)[-1][None, :, None]
    phases = []
    for direction, whole, of_head in zip(_DIRECTIONS, steps.priced.blocks, steps.head, strict=False):
        busy, seconds = whole.reshape(tokens.shape), attention[direction]
        shown = shown_seconds(moved[direction], seconds, busy - seconds, plan, job)
        block, head = (_slowest_of_pool(part, plan.pools) for part in (busy + shown, of_head.reshape(tokens.shape)))
        phases.append(share * block[:, None] + last * head[:, None])
    received = sum(float(part.received.sum()) for part in moved.values()) / plan.ranks
    moving = share * moving_seconds(moved["backward"], plan, job)[:, None]
    return SlotSeconds(phases[0], phases[1], tokens, moving), received * job.shape.layers / job.layout.pp


def _lockstep_seconds(seconds: SlotSeconds, ranks: Ranks) -> float:
    """A step in which all pipeline stages run each tick together: the slowest stage sets the pace."""
    job, costs = ranks.job, own_costs(ranks.job)
    forward, backward = (
        np.stack([phase[s * ranks.count : (s + 1) * ranks.count, s].max(axis=0) for s in range(job.layout.pp)])
        for phase in (seconds.forward, seconds.backward)
    )  # (stages, ticks)
    gathered, _ = costs.with_gathers(forward, backward)
    waits = float((gathered - forward)[:, 0].max())
    filling = 2 * (job.layout.pp - 1) * float(costs.job.transfer_seconds(seconds.tokens.max()))
    update = float((costs.rank_reduction + costs.optimizer).max())
    return waits + filling + sum(float(phase.max(axis=0).sum()) for phase in (forward, backward)) + update


def step_seconds(
    seconds: SlotSeconds,
    began: NDArray[np.int64],
    ranks: Ranks,
    *,
    updates_weights: bool = True,
    fetched: bool = False,
) -> float:
    """The whole step. Ranks with the same number in ``began``, shape (ranks, slots), start a slot together.

    Without ``updates_weights`` it ends with the last backward. With ``fetched`` each rank fetches its own weights.
    """
    job = fetching(ranks.job) if fetched else ranks.job
    costs = own_costs(job)
    forward, backward = seconds.forward[None], seconds.backward[None]
    if not job.layout.keeps_weights and not fetched:
        began = np.zeros_like(began)  # weights are gathered from all ranks in every micro-batch
    staged = costs.with_gathers(forward, backward, moving=seconds.moving)
    if fetched:  # except by ranks without a micro-batch left
        forward_gathered, backward_gathered = (np.where(seconds.tokens[:, None] > 0, phase, 0.0) for phase in staged)
        staged = forward_gathered, backward_gathered
    slots = -(-forward.shape[-1] // job.layout.pp) * job.layout.pp if job.layout.virtual_pp > 1 else forward.shape[-1]
    forwards, backwards = (_filled(values[0], slots) for values in staged)
    transfer = _filled(costs.job.transfer_seconds(seconds.tokens), slots) if job.layout.pp > 1 else 0.0
    together = _filled(began.astype(np.float64), slots).astype(np.int64)
    ends = joined_ends(job.layout.operations(slots), forwards, backwards, together, transfer).max(axis=1)
    if updates_weights:
        ends = ends + costs.late_reduction(backward)[:, 0] + costs.optimizer
    return float(ends.max())


def joined_ends(
    operations: RankOperations, forward: Array, backward: Array, together: NDArray[np.int64], transfer: ArrayLike = 0.0
) -> Array:
    """When each pipeline rank has finished, (pp, pipelines), from seconds of shape (pipelines, stages, micro_batches).

    Pipelines with the same number in ``together``, (pipelines, micro_batches), from 0 to the number of pipelines, begin
    each operation of the micro-batch when all of them can. ``transfer`` is as in ``pipeline_times``.
    """
    delays, rank_ends = np.broadcast_to(transfer, together.shape), np.zeros((len(operations), len(forward)))
    ends: dict[tuple[int, int, bool], Array] = {}
    for stage, micro_batch, kind in in_dependency_order(operations):
        rank, forwards = stage % len(operations), kind == FORWARD
        sender, arrival = (stage - 1 if forwards else stage + 1), rank_ends[rank]
        if (sent := ends.get((sender, micro_batch, forwards))) is not None:
            arrival = np.maximum(arrival, sent + delays[:, micro_batch] * (sender % len(operations) != rank))
        elif not forwards:  # the last stage waits for its own forward
            arrival = np.maximum(arrival, ends[stage, micro_batch, True])
        latest = np.zeros(1 + len(forward))
        np.maximum.at(latest, together[:, micro_batch], arrival)
        seconds = (forward if forwards else backward)[:, stage, micro_batch]
        rank_ends[rank] = ends[stage, micro_batch, forwards] = latest[together[:, micro_batch]] + seconds
    return rank_ends


def fetching(job: Job) -> Job:
    """``job`` with every rank fetching weights and sending gradients on its own."""
    return replace(job, software=replace(job.software, fetches_shards=True))


def ideal_seconds(lengths: NDArray[np.int64], ranks: Ranks) -> float:
    """The step if all ranks had the same documents in every micro-batch and exchanged nothing."""
    job, costs = ranks.job, own_costs(ranks.job)
    tokens = float(lengths.sum()) / ranks.count
    slots = -(-max(1, round(tokens)) // ranks.capacity)
    slots = -(-slots // job.layout.pp) * job.layout.pp
    starts = np.zeros_like(lengths)
    attention = [float(costs.rank.piece_seconds(starts, lengths, d).sum()) / ranks.count / slots for d in _DIRECTIONS]
    alike = _alone(costs, *(np.array([of_slot]) for of_slot in (tokens / slots, *attention)))
    forward, backward = (np.repeat(phase[0], slots, axis=2) for phase in alike.stages)
    seconds = SlotSeconds(forward, backward, np.full((1, slots), tokens / slots))
    return step_seconds(seconds, np.zeros((1, slots), np.int64), ranks)


def peak_memory(ranks: Ranks, tokens: float, group: int) -> float:
    """Bytes on a GPU if every micro-batch leaves ``tokens`` tokens on a rank, in groups of the given size."""
    return float(_peak(ranks.job, max(1, round(tokens)), min(group, ranks.count)))


@lru_cache(maxsize=4096)
def _peak(job: Job, tokens: int, members: int) -> int:
    count = max(1, job.layout.dp // members)
    grouped = replace(
        job,
        layout=replace(job.layout, cp=members, dp=count),
        packing=job.packing.changed(global_batch=count * _MANY * job.layout.pp),
        sharding=ShardingConfig(strategy="per_document"),
    )
    return predict_memory(grouped, [tokens * members] * grouped.rank_micro_batches).total


_DIRECTIONS: tuple[Phase, Phase] = ("forward", "backward")
# Micro-batches per stage for which memory is predicted: enough to fill a pipeline and to accumulate gradients.
_MANY = 4


class _Stages(NamedTuple):
    forward: Array  # (stages, groups)
    backward: Array
    moving: Array
    received_bytes: float  # of all layers


def _priced(lengths: Sequence[Sequence[int]], size: int, nodes: int, job: Job, plan: GroupPlan) -> _Stages:
    """Price groups of ``size`` ranks on the given number of nodes, with documents of ``lengths``."""
    if plan.exchange == "heads" and size > 1:
        return _priced_over_heads(lengths, size, nodes, job, plan.sharding)
    costs = own_costs(job, nodes)
    shards = price_shards(lengths, size, plan.sharding, costs.rank)
    steps = Steps.of_shards(shards.reshaped(1, 1, len(lengths)), costs)
    forward, backward, moving = (phase[0, 0] for phase in (*steps.stages, steps.moving))
    return _Stages(forward, backward, moving, received_bytes(shards, job))


def _priced_over_heads(lengths: Sequence[Sequence[int]], size: int, nodes: int, job: Job, sharding: str) -> _Stages:
    """Each rank has all tokens of some heads for attention, and some of the tokens for everything else."""
    costs = own_costs(job)
    shards = price_shards(lengths, 1, sharding, costs.rank)
    tokens = shards.tokens[:, 0]
    longest = [max(of_one) for of_one in lengths]
    attention = []
    for direction, whole in zip(_DIRECTIONS, (shards.attention_forward, shards.attention_backward), strict=True):
        drain = costs.rank.drain_seconds(longest, direction)  # of however few heads
        attention.append((whole[:, 0] - drain) / size + drain)
    steps = _alone(costs, tokens / size, *attention)
    wire, received = all_to_all_of_heads(job, tokens, size, nodes)
    of_wire = costs.job.stage_shares[:, None] * wire
    again = 2 if job.activation_checkpointing == "full" else 1
    forward, backward, moving = (phase[0, 0] for phase in (*steps.stages, steps.moving))
    passed = float(received.sum()) * size * (1 + again) * job.shape.layers
    return _Stages(forward + of_wire, backward + again * of_wire, moving + of_wire, passed)


def received_bytes(shards: Shards, job: Job) -> float:
    """Bytes of keys, values and their gradients that context-parallel ranks receive in a step, over all layers."""
    sent_again = np.where(
        shards.kept & (job.activation_checkpointing != "full"), 2, 3
    )  # forward, gradients back, and forward again
    return float((shards.received.sum(axis=-1) * sent_again).sum()) * kv_bytes(job) * job.shape.layers


own_costs = lru_cache(maxsize=4096)(JobCosts)


def _alone(costs: JobCosts, tokens: Array, forward: Array, backward: Array) -> Steps:
    """Price micro-batches of single ranks, which exchange nothing; shapes (micro-batches,)."""
    none = np.zeros((len(tokens), 1), np.int64)
    shards = Shards(
        np.ceil(tokens).astype(np.int64)[:, None],
        np.ones((len(tokens), 1)),
        *(none, none, none, none),
        np.ones(len(tokens), np.bool_),
        np.ones(len(tokens), np.int64),
        np.zeros(len(tokens), np.bool_),
        forward[:, None],
        backward[:, None],
    )
    return Steps.of_shards(shards.reshaped(1, 1, len(tokens)), costs)


def _slowest_of_pool(seconds: Array, pools: NDArray[np.int64]) -> Array:
    """The slowest rank of each rank's pool; shapes (ranks, slots)."""
    place = pools + len(pools) * np.arange(pools.shape[1])
    most = np.zeros(pools.size)
    np.maximum.at(most, place.ravel(), seconds.ravel())
    return np.asarray(most[place], np.float64)


def _filled(values: Array, slots: int) -> Array:
    return np.concatenate([values, np.zeros((*values.shape[:-1], slots - values.shape[-1]))], axis=-1)
