"""What FSDP adds to a step: gathering weights before use, and reducing gradients afterwards.

Where weights are kept, a rank gathers them once, from the start of the step, and reduces all gradients after its last
backward: nothing hides that, but no rank waits for others before (``wlb.runtime.own_lists``). Otherwise, to save
memory, every backward gathers those that its forward freed, and the last one reduces gradients as well. These run one
block at a time beside computing, so the collective of a block costs time only as far as it takes longer than computing
a block.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.simulate.costs import JobCosts

Array = NDArray[np.float64]


def with_gathers(costs: JobCosts, forward: Array, backward: Array, *, moving: ArrayLike = 0.0) -> tuple[Array, Array]:
    """Seconds of stages in micro-batches, shape (..., stages, micro-batches), with the gathers of weights.

    Keys and values use the links for ``moving`` seconds of each forward and backward; gathers run before and after,
    because they share adapters.
    """
    first, always = np.arange(forward.shape[-1]) == 0, costs.job.software.syncs_always
    if costs.layout.keeps_weights:
        return forward + first * waiting_for_weights(costs, forward[..., 0])[..., None], backward
    moved = np.asarray(moving, np.float64)
    gathers = (first | always) * _gathered_a_block_ahead(costs, forward - moved)
    backward = backward + _gathered_a_block_ahead(costs, backward - moved)
    if always:
        backward[..., 0, :-1] += reduced_behind(costs, backward[..., 0, :-1])
    return forward + gathers, backward


def late_reduction(costs: JobCosts, backward: Array) -> Array:
    """Seconds that reducing gradients adds after the last backward, or to it, if it also gathers; shape (pp, steps).

    ``backward`` are the seconds of stages in micro-batches, shape (steps, dp, stages, micro-batches).
    """
    if costs.layout.keeps_weights:
        return np.broadcast_to(costs.rank_reduction[:, None], (costs.layout.pp, len(backward)))
    last = backward[:, :, 0, -1].max(axis=1)  # (steps,)
    return reduced_behind(costs, last)[None]


def reduced_behind(costs: JobCosts, seconds: Array) -> Array:
    """Seconds that reducing gradients adds to backwards of ``seconds``, one block at a time between gathers.

    For models of one stage; same shape.
    """
    blocks = costs.job.stage_blocks[0]
    free = np.maximum(0.0, seconds / blocks - costs.block_gather)
    late = costs.root_reduction[0] + costs.block_reduction
    return np.asarray(late + (blocks - 1) * beside_computing(costs, costs.block_reduction, free))


def _gathered_a_block_ahead(costs: JobCosts, seconds: Array) -> Array:
    """What gathers add to stages whose links are free for ``seconds``, shape (..., stages, micro-batches)."""
    blocks, gather = costs.job.stage_blocks[:, None], costs.block_gather
    shown = np.asarray(gather, np.float64)
    if costs.job.software.prefetch:
        shown = beside_computing(costs, gather, np.maximum(seconds, 0.0) / blocks)
    all_blocks: Array = costs.root_gather[:, None] + gather + (blocks - 1) * shown + blocks * costs.block_copy
    return np.broadcast_to(all_blocks, seconds.shape)


def beside_computing(costs: JobCosts, collective: float, seconds: Array) -> Array:
    """Time that a collective adds to ``seconds`` of computing: the part that outlasts it, and the slowdown of it."""
    return np.maximum(0.0, collective - seconds) + costs.job.hardware.exposed * np.minimum(collective, seconds)


def waiting_for_weights(costs: JobCosts, forward: Array) -> Array:
    """Seconds that the first micro-batch waits for weights on each stage; shape of ``forward``, (..., stages).

    A rank gathers its stages one after another, block by block; the micro-batch moves from stage to stage.
    """
    begins = np.zeros(costs.layout.stages)  # when the gathers of a stage begin
    for mine in costs.layout.rank_stages:
        gathers = costs.root_gather[mine] + costs.job.stage_blocks[mine] * costs.block_gather
        begins[mine] = np.cumsum(gathers) - gathers
    first_block = begins + costs.root_gather + costs.block_gather  # when the first block of a stage is gathered
    last_block = first_block + (costs.job.stage_blocks - 1) * costs.block_gather
    waiting = np.zeros(forward.shape)
    arrives = np.zeros(forward.shape[:-1])
    for stage, blocks in enumerate(np.maximum(costs.job.stage_blocks, 1).tolist()):  # a last stage may have none
        seconds = forward[..., stage]
        ends = np.maximum(np.maximum(arrives, first_block[stage]) + seconds, last_block[stage] + seconds / blocks)
        waiting[..., stage] = ends - arrives - seconds
        arrives = ends
    return waiting
