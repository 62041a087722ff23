"""Steps of a simulated job, and where their time goes.

From the plans of some steps come the seconds of every context-parallel rank (``shards``), of every stage in every
micro-batch, and of every pipeline. Where the time goes is found by building the step up: first every GPU has the mean
work and nothing else happens, then one thing after another is added, and what each adds to the step is its share. So
the shares sum to the step, and nothing is counted twice. The order is that of ``CAUSES``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.packing.plan import StepPlan
from wlb.schedules.makespan import PipelineTimes, pipeline_times
from wlb.schedules.operations import stages_of_rank
from wlb.sharding.group import RankSeconds, backward_seconds, forward_seconds
from wlb.simulate.costs import JobCosts
from wlb.simulate.job import SimulatedJob
from wlb.simulate.shards import price_shards

# Of a step's seconds, in the order in which they are added.
CAUSES = {
    "compute": "the mean GPU's forward and backward: what balancing cannot remove",
    "recomputation": "forward again, for activation checkpointing",
    "bubbles": "filling and draining a perfectly balanced pipeline",
    "stages": "stages that hold different amounts of the model",
    "micro-batches": "micro-batches of one pipeline that differ",
    "dp ranks": "waiting for the slowest data-parallel rank",
    "cp ranks": "waiting for the slowest context-parallel rank, layer by layer",
    "tp collectives": "gathering and reducing activations over tensor-parallel ranks",
    "cp exchange": "keys and values under way that no computing hides, and their copies",
    "stage transfers": "activations under way between pipeline ranks",
    "weight gathers": "FSDP's weights under way that no computing hides",
    "gradient reduction": "FSDP's gradients under way that no computing hides",
    "optimizer": "clipping and AdamW",
}
_WEIGHT_SHARE = (
    0.5  # of a matrix product's backward: it multiplies once for the input's gradient, once for the weight's
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StepResults:
    """What some steps take, in seconds.

    ``where`` divides ``seconds`` among ``CAUSES``. ``gpu_seconds`` is what each GPU computes in the step, collectives
    and waiting left out; tensor-parallel ranks are alike. ``micro_batch_seconds`` is the same for each context-parallel
    rank of each micro-batch, over all stages.
    """

    tokens: NDArray[np.int64]  # (steps,)
    seconds: Array  # (steps,)
    where: dict[str, Array]  # (steps,) each
    gpu_seconds: Array  # (steps, pp, dp, cp)
    micro_batch_seconds: Array  # (steps, dp, micro-batches, cp)


class StageSeconds(NamedTuple):
    """Of every stage in every micro-batch, shape (steps, dp, stages, micro-batches)."""

    forward: Array
    backward: Array
    weight: Array  # the part of the backward that zero-bubble schedules put off


def simulate_steps(plans: Sequence[StepPlan], job: SimulatedJob | JobCosts) -> StepResults:
    """What each of ``plans`` takes, dealt to the job's data-parallel ranks already."""
    costs = job if isinstance(job, JobCosts) else JobCosts(job)
    return Steps(plans, costs).results()


def simulate_step(plan: StepPlan, job: SimulatedJob | JobCosts) -> StepResults:
    """``simulate_steps`` of one step."""
    return simulate_steps([plan], job)


@dataclass(frozen=True)
class Modelled:
    """What is taken into account so far; everything else is ideal."""

    recomputation: bool = False
    stages: bool = False
    micro_batches: bool = False
    slowest_dp: bool = False
    slowest_cp: bool = False
    tensor_collectives: bool = False
    exchange: bool = False
    transfers: bool = False
    gathers: bool = False
    reduction: bool = False
    optimizer: bool = False


EVERYTHING = Modelled(*[True] * 11)
_ADDED = {
    "stages": "stages",
    "micro-batches": "micro_batches",
    "dp ranks": "slowest_dp",
    "cp ranks": "slowest_cp",
    "tp collectives": "tensor_collectives",
    "cp exchange": "exchange",
    "stage transfers": "transfers",
    "weight gathers": "gathers",
    "gradient reduction": "reduction",
    "optimizer": "optimizer",
}


class Steps:
    """Some steps and their prices; a cause more or less is one argument."""

    def __init__(self, plans: Sequence[StepPlan], costs: JobCosts) -> None:
        self.costs, self.job = costs, costs.job
        lengths = [micro_batch.lengths for plan in plans for micro_batch in plan.micro_batches]
        self.shards = price_shards(lengths, costs).reshaped(len(plans), self.job.dp, self.job.micro_batches_per_rank)
        tokens = self.shards.tokens
        self.blocks_forward, self.blocks_backward = (costs.blocks(tokens, d) for d in ("forward", "backward"))
        self.head_forward, self.head_backward = (costs.head(tokens, d) for d in ("forward", "backward"))

    def results(self) -> StepResults:
        compute = self.shards.attention_forward + self.shards.attention_backward
        compute = compute + self.blocks_forward + self.blocks_backward
        head = self.head_forward + self.head_backward
        micro_batch_seconds = compute + head
        return StepResults(
            tokens=self.shards.tokens.sum(axis=(1, 2, 3)),
            seconds=self._seconds(EVERYTHING),
            where=self._where(micro_batch_seconds),
            gpu_seconds=self._by_gpu(compute.sum(axis=2), head.sum(axis=2)),
            micro_batch_seconds=micro_batch_seconds,
        )

    def _where(self, micro_batch_seconds: Array) -> dict[str, Array]:
        compute = micro_batch_seconds.mean(axis=(1, 3)).sum(axis=1) / self.job.pp
        modelled = Modelled(recomputation=True)
        before = self._seconds(modelled)
        busy = self._stage_seconds(modelled)
        busy_seconds = (busy.forward + busy.backward)[:, 0].sum(axis=(1, 2)) / self.job.pp
        where = {"compute": compute, "recomputation": busy_seconds - compute, "bubbles": before - busy_seconds}
        for cause, name in _ADDED.items():
            modelled = replace(modelled, **{name: True})
            after = self._seconds(modelled)
            where[cause] = after - before
            before = after
        return where

    def _by_gpu(self, blocks: Array, head: Array) -> Array:
        """Seconds of GPUs, (steps, pp, dp, cp), from those of whole models, (steps, dp, cp)."""
        job = self.job
        by_rank = []
        for rank in range(job.pp):
            mine = stages_of_rank(job.schedule, rank, job.pp, job.virtual_pp)
            share = self.costs.stage_shares[list(mine)].sum()
            by_rank.append(share * blocks + (job.stages - 1 in mine) * head)
        return np.stack(by_rank, axis=1)

    def _seconds(self, modelled: Modelled) -> Array:
        """What the steps take; shape (steps,)."""
        ends = self.pipelines(modelled).rank_ends  # (pp, steps, dp)
        of_rank = ends.max(axis=2) if modelled.slowest_dp else ends.mean(axis=2)
        if modelled.reduction:
            of_rank = of_rank + self.late_reduction(modelled)
        if modelled.optimizer:
            of_rank = of_rank + self.costs.optimizer[:, None]
        seconds: Array = of_rank.max(axis=0)
        return seconds

    def pipelines(self, modelled: Modelled) -> PipelineTimes:
        stages = self._stage_seconds(modelled)
        forward, backward = stages.forward, stages.backward
        if modelled.gathers:
            forward, backward = self._with_gathers(forward, backward)
        if self.job.pp == 1 and modelled.slowest_dp:
            forward, backward = (self._in_step(seconds) for seconds in (forward, backward))
        transfer = (
            self.costs.transfer(self.shards.tokens.max(axis=3)) if modelled.transfers and self.job.pp > 1 else 0.0
        )
        return pipeline_times(
            self.job.schedule, forward, backward, self.job.virtual_pp, weight=stages.weight, transfer=transfer
        )

    def _in_step(self, seconds: Array) -> Array:
        """Without a pipeline FSDP gathers weights in every micro-batch, so data-parallel ranks wait for each other."""
        return np.broadcast_to(seconds.max(axis=1, keepdims=True), seconds.shape)

    def compute_seconds(self) -> StageSeconds:
        """What each context-parallel rank computes, without waiting; shape (steps, dp, stages, micro-batches, cp)."""
        shares = self.costs.stage_shares[:, None, None]
        of_last = (np.arange(self.job.stages) == self.job.stages - 1)[:, None, None]
        shards = self.shards

        def over_stages(blocks: Array, head: Array) -> Array:
            seconds: Array = shares * blocks[:, :, None] + of_last * head[:, :, None]
            return seconds

        return StageSeconds(
            over_stages(shards.attention_forward + self.blocks_forward, self.head_forward),
            over_stages(shards.attention_backward + self.blocks_backward, self.head_backward),
            _WEIGHT_SHARE * over_stages(self.blocks_backward, self.head_backward),
        )

    def _stage_seconds(self, modelled: Modelled) -> StageSeconds:
        blocks_forward, blocks_backward = self._group_seconds(modelled)
        head_forward, head_backward, blocks_weight = (
            _over_micro_batches(_together(seconds, modelled), modelled)
            for seconds in (self.head_forward, self.head_backward, self.blocks_backward)
        )
        shares = np.full(self.job.stages, 1 / self.job.stages)
        head_shares = shares
        if modelled.stages:
            shares = self.costs.stage_shares
            head_shares = np.zeros(self.job.stages)
            head_shares[-1] = 1.0

        def over_stages(blocks: Array, head: Array) -> Array:
            seconds: Array = shares[:, None] * blocks[:, :, None] + head_shares[:, None] * head[:, :, None]
            return seconds

        return StageSeconds(
            over_stages(blocks_forward, head_forward),
            over_stages(blocks_backward, head_backward),
            _WEIGHT_SHARE * over_stages(blocks_weight, head_backward),
        )

    def _group_seconds(self, modelled: Modelled) -> tuple[Array, Array]:
        """Forward and backward of all blocks, of context-parallel groups; shape (steps, dp, micro-batches)."""
        shards, job = self.shards, self.job
        rest_forward, rest_backward = self._outside_attention(modelled)
        exchange = self.costs.exchange(shards.exchanged) if modelled.exchange else np.zeros(shards.exchanged.shape)

        def of_ranks(attention: Array, rest: Array) -> RankSeconds:
            own = shards.own_share * attention
            return RankSeconds(own, attention - own, rest)

        def together(seconds: Array) -> Array:
            return _together(seconds, modelled)

        ranks = of_ranks(shards.attention_forward, rest_forward)
        if modelled.recomputation and job.activation_checkpointing != "none":
            rest_backward = rest_backward + rest_forward
            if job.activation_checkpointing == "full":
                rest_backward = rest_backward + np.maximum(ranks.own, exchange[..., None]) + ranks.received
        forward = forward_seconds(ranks, exchange, together)
        backward = backward_seconds(of_ranks(shards.attention_backward, rest_backward), exchange, shards.kept, together)
        if modelled.exchange:
            forward = forward + self.costs.copies(shards.exchanged, "forward")
            backward = backward + self.costs.copies(shards.exchanged, "backward")
        return _over_micro_batches(forward, modelled), _over_micro_batches(backward, modelled)

    def _outside_attention(self, modelled: Modelled) -> tuple[Array, Array]:
        if not modelled.tensor_collectives:
            return self.blocks_forward, self.blocks_backward
        forward = self.blocks_forward + self.costs.tensor_collectives(self.shards.tokens, "forward")
        return forward, self.blocks_backward + self.costs.tensor_collectives(self.shards.tokens, "backward")

    def _with_gathers(self, forward: Array, backward: Array) -> tuple[Array, Array]:
        """A pipeline rank gathers its weights once, from the start of the step on, and its first micro-batch may wait.

        Without a pipeline the first forward gathers them a block ahead, so that a block's gather shows as far as it
        takes longer than a block; each backward gathers what its forward freed, and the last one also reduces gradients
        meanwhile.
        """
        if self.job.pp > 1:
            first = self._waiting_for_weights(forward[..., 0])[..., None]
        else:
            first = self._gathered_a_block_ahead(forward[..., :1])
            backward = backward + self._gathered_a_block_ahead(backward)
        return np.concatenate([forward[..., :1] + first, forward[..., 1:]], axis=-1), backward

    def _gathered_a_block_ahead(self, seconds: Array) -> Array:
        """What gathers add to ``seconds`` of stages in micro-batches, (..., stages, micro-batches)."""
        blocks, gather = self.costs.stage_blocks[:, None], self.costs.block_gather
        late: Array = np.maximum(0.0, gather - seconds / blocks)
        return self.costs.root_gather[:, None] + gather + (blocks - 1) * late

    def _waiting_for_weights(self, forward: Array) -> Array:
        """What the first micro-batch, of ``forward`` seconds a stage (..., stages), waits on each; the same shape.

        A rank gathers its stages one after another, block by block; the micro-batch comes from stage to stage.
        """
        costs, job = self.costs, self.job
        gathered = np.zeros(job.stages)  # when a stage's gathers begin
        for rank in range(job.pp):
            mine = list(stages_of_rank(job.schedule, rank, job.pp, job.virtual_pp))
            seconds = costs.root_gather[mine] + costs.stage_blocks[mine] * costs.block_gather
            gathered[mine] = np.cumsum(seconds) - seconds
        waiting = np.zeros(forward.shape)
        arrives = np.zeros(forward.shape[:-1])
        for stage, blocks in enumerate(costs.stage_blocks.tolist()):
            seconds = forward[..., stage]
            first = gathered[stage] + costs.root_gather[stage] + costs.block_gather
            last = first + (blocks - 1) * costs.block_gather
            ends = np.maximum(np.maximum(arrives, first) + seconds, last + seconds / blocks)
            waiting[..., stage] = ends - arrives - seconds
            arrives = ends
        return waiting

    def late_reduction(self, modelled: Modelled) -> Array:
        """What reducing gradients adds after (or, without a pipeline, to) the last backward; (pp, steps)."""
        costs = self.costs
        if self.job.pp > 1:
            return costs.rank_reduction[:, None]
        backward = self._stage_seconds(modelled).backward[:, :, 0, -1].max(axis=1)  # (steps,)
        blocks = costs.stage_blocks[0]
        free = np.maximum(0.0, backward / blocks - costs.block_gather)  # of the network, during one block
        late = costs.root_reduction[0] + costs.block_reduction
        shown: Array = late + (blocks - 1) * np.maximum(0.0, costs.block_reduction - free)
        return shown[None]


def _together(seconds: Array, modelled: Modelled) -> Array:
    """Seconds of groups from those of context-parallel ranks."""
    together: Array = seconds.max(axis=-1) if modelled.slowest_cp else seconds.mean(axis=-1)
    return together


def _over_micro_batches(seconds: Array, modelled: Modelled) -> Array:
    """Seconds of groups, shape (steps, dp, micro-batches), or of all micro-batches of a step the mean."""
    if modelled.micro_batches:
        return seconds
    return np.broadcast_to(seconds.mean(axis=(1, 2), keepdims=True), seconds.shape)
