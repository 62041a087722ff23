"""Costs of a step beside its micro-batches: gathering weights, reducing gradients, and the optimizer.

Where weights are kept, a rank gathers them once, from the start of the step, and reduces all gradients after its last
backward: nothing hides that, but no rank waits for others before (``wlb.runtime.own_lists``). Otherwise, to save
memory, every backward gathers those that its forward freed, and the last one reduces gradients as well. These run one
block at a time beside computing, so the collective of a block costs time only as far as it takes longer than computing
a block.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.job.job import Job
from wlb.workload.costs import MASTER_BYTES
from wlb.workload.links import Traffic, group_link, shard_bytes
from wlb.workload.weights import expert_weights, mean_block_weights

# Float32 values read or written for each weight: the gradient for its norm, twice for clipping, and weight, gradient
# and both moments by AdamW. Derived by counting, with fused kernels.
_OPTIMIZER_VALUES = 1 + 2 + 7

Array = NDArray[np.float64]


class JobCosts:
    """Prices of one job, in seconds of one GPU; ``rank`` prices its micro-batches (``wlb.workload.costs``).

    A context-parallel group lies on ``nodes`` nodes, by default on as few as possible.
    """

    def __init__(self, job: Job, nodes: int | None = None) -> None:
        self.job, self.layout = job, job.layout
        self.rank = job.costs if nodes is None else replace(job.costs, nodes=nodes)

    @cached_property
    def block_gather(self) -> float:
        """Seconds to gather the weights of one block over the ranks that share them."""
        return self._of_block(self.job.hardware.bytes_per_value)

    @cached_property
    def block_copy(self) -> float:
        """Seconds to copy the gathered weights of one block: reading and writing them."""
        sharing, hardware = self.layout.dp_cp > 1, self.job.hardware
        return sharing * 2 * sum(self._own_block_weights) * hardware.bytes_per_value / hardware.memory_bandwidth

    @cached_property
    def block_reduction(self) -> float:
        """Seconds to reduce-scatter the gradients of one block."""
        return self._of_block(MASTER_BYTES)

    @cached_property
    def root_gather(self) -> Array:
        """Seconds to gather the weights of each stage outside blocks; shape (stages,)."""
        return np.array([self._over_shards(w * self.job.hardware.bytes_per_value) for w in self._root_weights])

    @cached_property
    def root_reduction(self) -> Array:
        return np.array([self._over_shards(w * MASTER_BYTES) for w in self._root_weights])

    @cached_property
    def rank_reduction(self) -> Array:
        """Seconds to reduce all gradients of each pipeline rank, and then to sum those of a dealt head; shape (pp,).

        With tied embeddings every rank has a copy of that.
        """
        reduction = self._by_rank(self.job.stage_blocks * self.block_reduction + self.root_reduction)
        if not self.layout.deals_head:
            return reduction
        shard = self._matrix * MASTER_BYTES / self.layout.dp_cp
        ranks = [*range(self.layout.pp)] if self.job.tied_embeddings else self.layout.head_stages
        link = group_link(self.job.hardware, "all_gather", len(ranks), self.layout.tp * self.layout.dp_cp)
        reduction[ranks] += 2 * link.seconds(shard_bytes(shard, len(ranks)))
        return reduction

    @cached_property
    def optimizer(self) -> Array:
        """Seconds of clipping and AdamW on the shards of each pipeline rank; shape (pp,)."""
        hardware, gpus = self.job.hardware, self.layout.world_size
        block_weights = mean_block_weights(self.job.shape) / self.layout.tp  # all experts included
        weights = self._by_rank(self.job.stage_blocks * block_weights + self._root_weights) / self.layout.dp_cp
        norm = 0.0 if gpus == 1 else group_link(hardware, "point_to_point", gpus, 1).latency
        return weights * _OPTIMIZER_VALUES * MASTER_BYTES / hardware.memory_bandwidth + norm

    def with_gathers(self, forward: Array, backward: Array, *, moving: ArrayLike = 0.0) -> tuple[Array, Array]:
        """Seconds of stages in micro-batches, shape (..., stages, micro-batches), with the gathers of weights.

        Keys and values use the links for ``moving`` seconds of each forward and backward; gathers run before and after,
        because they share adapters.
        """
        first, always = np.arange(forward.shape[-1]) == 0, self.job.software.syncs_always
        if self.layout.keeps_weights:
            return forward + first * self.waiting_for_weights(forward[..., 0])[..., None], backward
        moved = np.asarray(moving, np.float64)
        gathers = (first | always) * self._gathered_a_block_ahead(forward - moved)
        backward = backward + self._gathered_a_block_ahead(backward - moved)
        if always:
            backward[..., 0, :-1] += self._reduced_behind(backward[..., 0, :-1])
        return forward + gathers, backward

    def late_reduction(self, backward: Array) -> Array:
        """Seconds that reducing gradients adds after the last backward, or to it, if it also gathers; (pp, steps).

        ``backward`` are the seconds of stages in micro-batches, shape (steps, dp, stages, micro-batches).
        """
        if self.layout.keeps_weights:
            return np.broadcast_to(self.rank_reduction[:, None], (self.layout.pp, len(backward)))
        last = backward[:, :, 0, -1].max(axis=1)  # (steps,)
        return self._reduced_behind(last)[None]

    def waiting_for_weights(self, forward: Array) -> Array:
        """Seconds that the first micro-batch waits for weights on each stage; shape of ``forward``, (..., stages).

        A rank gathers its stages one after another, block by block; the micro-batch moves from stage to stage.
        """
        gather, blocks_of = self.block_gather, self.job.stage_blocks
        begins = np.zeros(self.layout.stages)  # when the gathers of a stage begin
        for mine in self.layout.rank_stages:
            gathers = self.root_gather[mine] + blocks_of[mine] * gather
            begins[mine] = np.cumsum(gathers) - gathers
        first_block = begins + self.root_gather + gather  # when the first block of a stage is gathered
        last_block = first_block + (blocks_of - 1) * gather
        waiting = np.zeros(forward.shape)
        arrives = np.zeros(forward.shape[:-1])
        for stage, blocks in enumerate(np.maximum(blocks_of, 1).tolist()):  # a last stage may have none
            seconds = forward[..., stage]
            ends = np.maximum(np.maximum(arrives, first_block[stage]) + seconds, last_block[stage] + seconds / blocks)
            waiting[..., stage] = ends - arrives - seconds
            arrives = ends
        return waiting

    def beside_computing(self, collective: float, seconds: Array) -> Array:
        """Time that a collective adds to ``seconds`` of computing: the part that outlasts it, and its slowdown."""
        return np.maximum(0.0, collective - seconds) + self.job.hardware.exposed * np.minimum(collective, seconds)

    def _reduced_behind(self, seconds: Array) -> Array:
        """Seconds that reducing gradients adds to backwards of ``seconds``, one block at a time between gathers.

        For models of one stage; same shape.
        """
        blocks = self.job.stage_blocks[0]
        free = np.maximum(0.0, seconds / blocks - self.block_gather)
        late = self.root_reduction[0] + self.block_reduction
        return np.asarray(late + (blocks - 1) * self.beside_computing(self.block_reduction, free))

    def _gathered_a_block_ahead(self, seconds: Array) -> Array:
        """What gathers add to stages whose links are free for ``seconds``, shape (..., stages, micro-batches)."""
        blocks, gather = self.job.stage_blocks[:, None], self.block_gather
        shown = np.asarray(gather, np.float64)
        if self.job.software.prefetch:
            shown = self.beside_computing(gather, np.maximum(seconds, 0.0) / blocks)
        all_blocks: Array = self.root_gather[:, None] + gather + (blocks - 1) * shown + blocks * self.block_copy
        return np.broadcast_to(all_blocks, seconds.shape)

    @property
    def _own_block_weights(self) -> tuple[float, float]:
        """Mean weights of a block on one GPU: of its experts alone, where it shares them with others, and the rest."""
        per_block = self.job.shape.layers * self.layout.tp
        experts = expert_weights(self.job.shape) / self.layout.ep_ranks if self.layout.ep > 1 else 0.0
        return experts / per_block, (self.rank.own_weights - experts) / per_block

    @cached_property
    def _root_weights(self) -> Array:
        """Weights of embedding and output head on one tensor-parallel rank of each stage; shape (stages,)."""
        ends = np.eye(self.layout.stages)
        matrices = ends[0] + ends[self.layout.head_stages].sum(axis=0)
        return np.asarray((np.minimum(matrices, 1) if self.job.tied_embeddings else matrices) * self._matrix)

    @property
    def _matrix(self) -> float:
        """Weights of the output head on one tensor-parallel rank."""
        return self.job.shape.vocab_size * self.job.shape.hidden / self.layout.tp

    def _of_block(self, bytes_per_weight: int) -> float:
        """Seconds of the collectives of a block; experts are divided over every ep-th GPU of the stage."""
        (experts, others), layout = self._own_block_weights, self.layout
        sharing = layout.dp_cp // layout.ep_ranks
        of_experts = self._over_shards(experts * bytes_per_weight, sharing, layout.ep) if experts else 0.0
        return of_experts + self._over_shards(others * bytes_per_weight)

    def _over_shards(self, whole_bytes: float, ranks: int | None = None, stride: int | None = None) -> float:
        traffic: Traffic = "all_to_all" if self.job.software.fetches_shards else "all_gather"
        ranks, stride = ranks or self.layout.dp_cp, stride or self.layout.tp
        link = group_link(self.job.hardware, traffic, ranks, stride)
        return float(link.seconds(shard_bytes(whole_bytes, ranks)))

    def _by_rank(self, of_stage: Array) -> Array:
        return np.array([of_stage[mine].sum() for mine in self.layout.rank_stages])
