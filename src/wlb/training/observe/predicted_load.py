"""Seconds that the workload model predicts for a rank's share of each micro-batch, to hold measurements against.

Compute only: attention over the rank's pieces and W_l of its tokens on its part of the layers. Prices are those of one
GPU, which has no collectives to pay, divided by the tensor-parallel size. The last stage also has the output head, the
difference between the model with and without a vocabulary, and the loss over its scores, which packing leaves out as
it is the same for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.plan import ShardPlan, owners
from wlb.workload import ModelShape, make_workload
from wlb.workload.hardware import hardware_preset

# Float32 values read and written for each score: log-softmax reads and writes them, its backward reads both the
# log-probabilities and their gradient and writes one; derived by counting.
_LOSS_BYTES_PER_SCORE = 5 * 4


class PredictedLoad:
    """Prices micro-batches for the ranks that hold ``layers``, the ranges of all chunks of a pipeline rank.

    With the last layer come the head and the loss.
    """

    def __init__(self, shape: ModelShape, hardware: str, layers: Sequence[range], tp: int = 1) -> None:
        self._blocks = make_workload(replace(shape, vocab_size=1), hardware)
        self._model = make_workload(shape, hardware)
        self._blocks_share = sum(map(len, layers)) / shape.layers / tp
        self._loss_token_seconds = shape.vocab_size * _LOSS_BYTES_PER_SCORE / hardware_preset(hardware).memory_bandwidth
        self._head_share = any(chunk.stop == shape.layers for chunk in layers) / tp

    def seconds(self, shard_plans: Sequence[ShardPlan]) -> NDArray[np.float64]:
        """Forward and backward of each micro-batch on each context-parallel rank; shape (micro_batches, cp)."""
        return np.stack([self._of_micro_batch(plan) for plan in shard_plans])

    def _of_micro_batch(self, plan: ShardPlan) -> NDArray[np.float64]:
        _, start, stop = np.concatenate(plan.pieces).T
        attention = np.bincount(owners(plan.pieces), self._blocks.piece_seconds(start, stop), plan.cp_size)
        blocks = self._blocks.linear_seconds(plan.tokens_per_rank)
        head = self._model.linear_seconds(plan.tokens_per_rank) - blocks
        head += self._loss_token_seconds * plan.tokens_per_rank
        seconds: NDArray[np.float64] = (attention + blocks) * self._blocks_share + head * self._head_share
        return seconds
