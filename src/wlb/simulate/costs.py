"""Costs of a step beside its micro-batches: gathering weights, reducing gradients, and the optimizer.

The ``Costs`` of the job (``wlb.workload.costs``), here ``rank``, price micro-batches. Seconds are of one GPU.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wlb.job.job import Job
from wlb.workload.costs import MASTER_BYTES
from wlb.workload.links import Traffic, group_link, shard_bytes
from wlb.workload.weights import expert_weights, mean_block_weights

# Float32 values read or written for each weight: the gradient for its norm, twice for clipping, and weight, gradient
# and both moments by AdamW. Derived by counting, with fused kernels.
_OPTIMIZER_VALUES = 1 + 2 + 7


class JobCosts:
    """Prices of one job. A context-parallel group lies on ``nodes`` nodes, by default on as few as possible."""

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
    def root_gather(self) -> NDArray[np.float64]:
        """Seconds to gather the weights of each stage outside blocks; shape (stages,)."""
        return np.array([self._over_shards(w * self.job.hardware.bytes_per_value) for w in self._root_weights])

    @cached_property
    def root_reduction(self) -> NDArray[np.float64]:
        return np.array([self._over_shards(w * MASTER_BYTES) for w in self._root_weights])

    @cached_property
    def rank_reduction(self) -> NDArray[np.float64]:
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
    def optimizer(self) -> NDArray[np.float64]:
        """Seconds of clipping and AdamW on the shards of each pipeline rank; shape (pp,)."""
        hardware, gpus = self.job.hardware, self.layout.world_size
        block_weights = mean_block_weights(self.job.shape) / self.layout.tp  # all experts included
        weights = self._by_rank(self.job.stage_blocks * block_weights + self._root_weights) / self.layout.dp_cp
        norm = 0.0 if gpus == 1 else group_link(hardware, "point_to_point", gpus, 1).latency
        return weights * _OPTIMIZER_VALUES * MASTER_BYTES / hardware.memory_bandwidth + norm

    @property
    def _own_block_weights(self) -> tuple[float, float]:
        """Mean weights of a block on one GPU: of its experts alone, where it shares them with others, and the rest."""
        per_block = self.job.shape.layers * self.layout.tp
        experts = expert_weights(self.job.shape) / self.layout.ep_ranks if self.layout.ep > 1 else 0.0
        return experts / per_block, (self.rank.own_weights - experts) / per_block

    @cached_property
    def _root_weights(self) -> NDArray[np.float64]:
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

    def _by_rank(self, of_stage: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([of_stage[mine].sum() for mine in self.layout.rank_stages])
