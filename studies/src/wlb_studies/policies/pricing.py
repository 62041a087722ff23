"""What a rival's plan costs: the same workload, links, FSDP and pipeline as those of every simulated job.

Groups are sharded and priced by the simulator itself (``wlb.simulate``), as context-parallel groups of their size that
lie on as many nodes. Moved attention is priced piece by piece; what it exchanges, and what hides that, is in
``exchange``. From the seconds of every rank in every micro-batch follows the step: ranks that run a micro-batch
together begin it together, pipelines run their schedule, and a step ends when the slowest has reduced gradients and
updated weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.job.config import ShardingConfig
from wlb.job.job import Job
from wlb.job.memory.step import predict_memory
from wlb.job.prices import nodes_of
from wlb.schedules.timing import pipeline_times
from wlb.sharding import price_shards
from wlb.sharding.latency import Shards
from wlb.simulate.costs import JobCosts
from wlb.simulate.fsdp import late_reduction, with_gathers
from wlb.simulate.step import Steps
from wlb.workload.base import Phase
from wlb_studies.policies.exchange import all_to_all_of_heads, kv_bytes, moved_bytes, moving_seconds, shown_seconds
from wlb_studies.policies.plan import GroupPlan, MovedPlan, Plan, Ranks

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StepPrice:
    """Seconds of a step, bytes that the mean GPU receives in it (FSDP's and tp's left out), and its peak memory."""

    seconds: float
    exchanged_bytes: float
    memory_bytes: float


class SlotSeconds(NamedTuple):
    """What every rank's stages take in every slot, shape (ranks, stages, slots), and its tokens, (ranks, slots).

    For ``moving`` of these seconds its links carry what ranks exchange for attention: of a forward, or where a backward
    brings more, of a backward, before each of which weights are gathered.
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
        # Sequence parallelism over heads holds whole sequences of few heads in place of its own part of all.
        largest = 1 if plan.exchange == "heads" else max(len(group.ranks) for group in plan.groups)
        exchanged /= ranks.count * ranks.job.layout.pp
    else:
        seconds, exchanged = moved_seconds(plan, ranks)
        in_lockstep = plan.ranks > ranks.count
        step = _lockstep_seconds(seconds, ranks) if in_lockstep else step_seconds(seconds, plan.pools, ranks)
        largest = ranks.count if in_lockstep else plan.pool_size
    return StepPrice(step, exchanged, peak_memory(ranks, float(seconds.tokens.max()), largest))


def begun_together(plan: GroupPlan, ranks: Ranks) -> NDArray[np.int64]:
    """One number for ranks that begin a slot together, shape (ranks, slots): a group's, or all before a barrier."""
    began = np.tile(np.arange(ranks.count)[:, None], plan.slots)
    for group in plan.groups:
        began[list(group.ranks), group.slot] = group.ranks[0]
    began[:, sorted(plan.barriers)] = 0
    return began


def group_seconds(plan: GroupPlan, ranks: Ranks) -> tuple[SlotSeconds, float]:
    """Seconds of all ranks, and bytes that they receive, of all layers, each rank's one tensor-parallel share."""
    job, by_kind = ranks.job, defaultdict(list)
    for group in plan.groups:
        by_kind[len(group.ranks), nodes_of(group.ranks, job.ranks_per_node)].append(group)
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
    """Seconds of all ranks, once those of a pool have waited for each other, and bytes received by the mean GPU."""
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
    for direction, whole, of_head in zip(_DIRECTIONS, steps.groups, steps.head, strict=False):
        busy, seconds = whole.reshape(tokens.shape), attention[direction]
        shown = shown_seconds(moved[direction], seconds, busy - seconds, plan, job)
        block, head = (_slowest_of_pool(part, plan.pools) for part in (busy + shown, of_head.reshape(tokens.shape)))
        phases.append(share * block[:, None] + last * head[:, None])
    received = sum(float(part.received.sum()) for part in moved.values()) / plan.ranks
    moving = share * moving_seconds(moved["backward"], plan, job)[:, None]
    return SlotSeconds(phases[0], phases[1], tokens, moving), received * job.shape.layers / job.layout.pp


def _lockstep_seconds(seconds: SlotSeconds, ranks: Ranks) -> float:
    """A step of which all pipeline stages run a tick together: its slowest stage decides, forward and backward."""
    job, costs = ranks.job, own_costs(ranks.job)
    forward, backward = (
        np.stack([phase[s * ranks.count : (s + 1) * ranks.count, s].max(axis=0) for s in range(job.layout.pp)])
        for phase in (seconds.forward, seconds.backward)
    )  # (stages, ticks)
    gathered, _ = with_gathers(costs, forward, backward)
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
    """The whole step, where ranks with the same number in ``began``, shape (ranks, slots), begin a slot together.

    Without ``updates_weights`` it ends with the last backward. ``fetched`` weights come to ranks on their own.
    """
    job = fetching(ranks.job) if fetched else ranks.job
    costs = own_costs(job)
    forward, backward = seconds.forward[None], seconds.backward[None]
    kept = job.layout.pp > 1 or ranks.keeps_weights
    if not kept and not fetched:
        began = np.zeros_like(began)  # weights are gathered from all in every micro-batch
    staged = with_gathers(costs, forward, backward, kept=kept, moving=seconds.moving)
    if fetched:  # not by ranks that have no micro-batch left
        forward_gathered, backward_gathered = (np.where(seconds.tokens[:, None] > 0, phase, 0.0) for phase in staged)
        staged = forward_gathered, backward_gathered
    slots = -(-forward.shape[-1] // job.layout.pp) * job.layout.pp if job.layout.virtual_pp > 1 else forward.shape[-1]
    forwards, backwards = (_filled(values, slots) for values in staged)
    times = pipeline_times(
        job.layout.operations(slots),
        forwards,
        backwards,
        transfer=_filled(costs.job.transfer_seconds(seconds.tokens)[None], slots) if job.layout.pp > 1 else 0.0,
        together=np.concatenate([began, np.zeros((len(began), slots - began.shape[1]), np.int64)], axis=1)[None],
    )
    ends = times.rank_ends[:, 0].max(axis=1)
    if updates_weights:
        ends = ends + late_reduction(costs, backward, kept=kept)[:, 0] + costs.optimizer
    return float(ends.max())


def fetching(job: Job) -> Job:
    """``job`` where every rank fetches weights and sends gradients on its own."""
    return replace(job, software=replace(job.software, fetches_shards=True))


def ideal_seconds(lengths: NDArray[np.int64], ranks: Ranks) -> float:
    """The step if every rank had the same documents in every micro-batch and nothing were exchanged."""
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
    """Bytes of a GPU where every micro-batch leaves ``tokens`` tokens on a rank, in groups of so many ranks."""
    return float(_peak(ranks.job, max(1, round(tokens)), min(group, ranks.count), ranks.keeps_weights))


@lru_cache(maxsize=4096)
def _peak(job: Job, tokens: int, members: int, keeps_weights: bool) -> int:
    count = max(1, job.layout.dp // members)
    if keeps_weights:
        job = replace(job, software=replace(job.software, weights="kept"))
    grouped = replace(
        job,
        layout=replace(job.layout, cp=members, dp=count),
        packing=job.packing.changed(micro_batches=count * _MANY * job.layout.pp),
        sharding=ShardingConfig(strategy="per_document"),
    )
    return predict_memory(grouped, [tokens * members] * grouped.micro_batches_per_rank).total


_DIRECTIONS: tuple[Phase, Phase] = ("forward", "backward")
# Micro-batches for each stage, of which memory is predicted: enough that a pipeline is full, and that gradients add up
# over several of them.
_MANY = 4


class _Stages(NamedTuple):
    forward: Array  # (stages, groups)
    backward: Array
    moving: Array
    received_bytes: float  # of all layers


def _priced(lengths: Sequence[Sequence[int]], size: int, nodes: int, job: Job, plan: GroupPlan) -> _Stages:
    """Groups of ``size`` ranks on so many nodes, with documents of ``lengths``."""
    if plan.exchange == "heads" and size > 1:
        return _priced_over_heads(lengths, size, nodes, job, plan.sharding)
    costs = own_costs(job, nodes)
    shards = price_shards(lengths, size, plan.sharding, costs.rank)
    steps = Steps.of_shards(shards.reshaped(1, 1, len(lengths)), costs)
    forward, backward, moving = (phase[0, 0] for phase in (*steps.stages, steps.moving))
    return _Stages(forward, backward, moving, received_bytes(shards, job))


def _priced_over_heads(lengths: Sequence[Sequence[int]], size: int, nodes: int, job: Job, sharding: str) -> _Stages:
    """Each rank has all tokens of a part of the heads for attention, and a part of the tokens for everything else."""
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
    """Keys, values and their gradients that context-parallel ranks receive in a step's micro-batches, of all layers."""
    sent_again = np.where(
        shards.kept & (job.activation_checkpointing != "full"), 2, 3
    )  # there, gradients back, and there again
    return float((shards.received.sum(axis=-1) * sent_again).sum()) * kv_bytes(job) * job.shape.layers


own_costs = lru_cache(maxsize=4096)(JobCosts)


def _alone(costs: JobCosts, tokens: Array, forward: Array, backward: Array) -> Steps:
    """Micro-batches of ranks that exchange nothing, each a group of its own; shapes (micro-batches,)."""
    none = np.zeros((len(tokens), 1), np.int64)
    shards = Shards(
        np.ceil(tokens).astype(np.int64)[:, None],
        forward[:, None],
        backward[:, None],
        np.ones((len(tokens), 1)),
        *(none, none, none, none),
        np.ones(len(tokens), np.bool_),
        np.ones(len(tokens), np.int64),
        np.zeros(len(tokens), np.bool_),
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
