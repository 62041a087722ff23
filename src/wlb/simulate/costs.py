"""Costs of one GPU of a job: compute, tensor-parallel collectives, stage transfers and weights.

Computing is priced without any links: by the analytic model of a single GPU, or by a measured profile, divided by the
tensor-parallel size. Everything that communicates is priced apart, from message sizes and the links of
``wlb.workload.links``, so that nothing is counted twice. Tokens are those of one context-parallel rank; seconds are
of all layers unless said otherwise, forward and backward apart.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.schedules.layer_split import split_layers
from wlb.schedules.operations import stages_of_rank
from wlb.simulate.job import SimulatedJob
from wlb.workload import Workload, make_workload
from wlb.workload.base import EXCHANGES, Seconds
from wlb.workload.flops import gemm_flops_per_token
from wlb.workload.links import group_link, shard_bytes
from wlb.workload.weights import mean_block_weights

Direction = Literal["forward", "backward"]

# Float32 values read and written for each score by the loss: log-softmax reads and writes them; its backward reads both
# the log-probabilities and their gradient and writes one. Derived by counting. A measured profile contains the loss.
_LOSS_BYTES_PER_SCORE = {"forward": 2 * 4, "backward": 3 * 4}
_MASTER_BYTES = 4  # weights, gradients and moments are float32
# Matrix products of few tokens take as long as moving their weights: a forward reads each once, and a backward, which
# also reads and writes its gradient in float32, where products add to it (NVIDIA/Megatron-LM,
# ``gradient_accumulation_fusion``). Derived by counting.
_GRADIENT_PASSES = {"forward": 0, "backward": 2}
# Float32 values touched for each weight: gradients for their norm, read and written by clipping, and AdamW's reads and
# writes of weight, gradient and both moments. Derived by counting, each kernel fused.
_OPTIMIZER_VALUES = 1 + 2 + 7


class JobCosts:
    """Prices of one job; arrays in, arrays of the same shape out."""

    def __init__(self, job: SimulatedJob) -> None:
        self.job = job
        self._single = make_workload(job.shape, job.hardware)
        self._parallel = make_workload(job.shape, job.hardware, tp=job.tp)
        profile = job.profile
        self._compute: Workload = profile.workload() if profile else self._single
        self._share = (profile.tp if profile else 1) / job.tp

    def attention(self, starts: ArrayLike, stops: ArrayLike, direction: Direction) -> Seconds:
        """Of pieces of documents: queries ``starts`` to ``stops``, keys 0 to ``stops``."""
        return self._share * self._compute.piece_seconds(starts, stops, direction)

    def attention_drain(self, stops: ArrayLike, direction: Direction) -> Seconds:
        """What a rank's attention takes beside its pieces, the longest of which reaches to key ``stops``."""
        return self._compute.drain_seconds(stops, direction)

    def blocks(self, tokens: ArrayLike, direction: Direction) -> Seconds:
        """W_l of ``tokens`` tokens without collectives, output head and loss."""
        return self._linear(tokens, direction) * (1 - self._head_share[direction])

    def head(self, tokens: ArrayLike, direction: Direction) -> Seconds:
        """Output head and loss of ``tokens`` tokens."""
        return self._linear(tokens, direction) * self._head_share[direction]

    def tensor_collectives(self, tokens: ArrayLike, direction: Direction) -> Seconds:
        """Gathering and reducing the residual stream over the tensor-parallel group."""
        together = self._parallel.linear_seconds(tokens, direction)
        alone: Seconds = together - self._single.linear_seconds(tokens, direction) / self.job.tp
        return np.maximum(alone, 0.0)  # rounding leaves less than nothing where there is no group

    def exchange(self, tokens: ArrayLike) -> Seconds:
        """Keys and values, or their gradients, between ranks of which the busiest moves ``tokens`` tokens."""
        return self._parallel.kv_gather_seconds(tokens, self.job.cp) / EXCHANGES

    def copies(self, sent: ArrayLike, received: ArrayLike, merged: ArrayLike, direction: Direction) -> Seconds:
        """What a rank spends in its memory on what it exchanges, and on merging the results of ``merged`` queries."""
        return self._parallel.kv_copy_seconds(sent, received, merged, direction)

    def transfer(self, tokens: ArrayLike) -> Seconds:
        """The residual stream of ``tokens`` tokens to a neighbouring pipeline rank; not of all layers, one message."""
        job = self.job
        stride = job.tp * job.cp * job.dp
        link = group_link(job.hardware, "point_to_point", job.pp, stride)
        token_bytes = job.shape.hidden * job.hardware.bytes_per_value / job.tp
        return link.seconds(np.asarray(tokens) * token_bytes)

    @cached_property
    def stage_shares(self) -> NDArray[np.float64]:
        """The part of all blocks that each stage holds; shape (stages,)."""
        return self.stage_blocks / self.job.shape.layers

    @cached_property
    def stage_blocks(self) -> NDArray[np.int64]:
        return np.array([len(layers) for layers in split_layers(self.job.shape, self.job.stages)])

    @cached_property
    def block_gather(self) -> float:
        """Gathering one block's weights over the ranks that share them."""
        return self._over_shards(self._block_weights * self.job.hardware.bytes_per_value)

    @cached_property
    def block_reduction(self) -> float:
        """Reducing and scattering one block's gradients."""
        return self._over_shards(self._block_weights * _MASTER_BYTES)

    @cached_property
    def root_gather(self) -> NDArray[np.float64]:
        """Gathering each stage's weights outside blocks; shape (stages,)."""
        return np.array([self._over_shards(w * self.job.hardware.bytes_per_value) for w in self._root_weights])

    @cached_property
    def root_reduction(self) -> NDArray[np.float64]:
        return np.array([self._over_shards(w * _MASTER_BYTES) for w in self._root_weights])

    @cached_property
    def rank_reduction(self) -> NDArray[np.float64]:
        """Reducing all gradients of each pipeline rank; shape (pp,)."""
        return self._by_rank(self.stage_blocks * self.block_reduction + self.root_reduction)

    @cached_property
    def optimizer(self) -> NDArray[np.float64]:
        """Clipping and AdamW on each pipeline rank's shards; shape (pp,)."""
        job = self.job
        weights = self._by_rank(self.stage_blocks * self._block_weights + self._root_weights) / (job.dp * job.cp)
        norm = 0.0 if job.gpus == 1 else group_link(job.hardware, "point_to_point", job.gpus, 1).latency
        return weights * _OPTIMIZER_VALUES * _MASTER_BYTES / job.hardware.memory_bandwidth + norm

    def _linear(self, tokens: ArrayLike, direction: Direction) -> Seconds:
        seconds = self._share * self._compute.linear_seconds(tokens, direction)
        if self.job.profile is None:
            count = np.asarray(tokens)
            seconds = seconds + count * (self._loss_token_seconds(direction) / self.job.tp)
            seconds = np.where(count > 0, np.maximum(seconds, self._moving_weights(direction)), 0.0)
        return seconds

    def _moving_weights(self, direction: Direction) -> float:
        """What a micro-batch of no matter how few tokens takes: all weights that a token is multiplied by, moved."""
        weights = gemm_flops_per_token(self.job.shape) / 2 / self.job.tp
        moved = self.job.hardware.bytes_per_value + _GRADIENT_PASSES[direction] * _MASTER_BYTES
        return weights * moved / self.job.hardware.memory_bandwidth

    def _loss_token_seconds(self, direction: Direction) -> float:
        return self.job.shape.vocab_size * _LOSS_BYTES_PER_SCORE[direction] / self.job.hardware.memory_bandwidth

    @cached_property
    def _head_share(self) -> dict[Direction, float]:
        """Output head and loss, of everything outside attention; a profile is divided in the hardware's proportion."""
        headless = make_workload(replace(self.job.shape, vocab_size=1), self.job.hardware)
        shares: dict[Direction, float] = {}
        for name in ("forward", "backward"):
            direction: Direction = "forward" if name == "forward" else "backward"
            loss = self._loss_token_seconds(direction)
            whole = float(self._single.linear_seconds(1, direction)) + loss
            shares[direction] = 1 - float(headless.linear_seconds(1, direction)) / whole
        return shares

    @cached_property
    def _block_weights(self) -> float:
        """Weights of a block on one tensor-parallel rank, all experts included; the mean of blocks that differ."""
        return mean_block_weights(self.job.shape) / self.job.tp

    @cached_property
    def _root_weights(self) -> NDArray[np.float64]:
        """Embedding and output head, on one tensor-parallel rank of each stage; shape (stages,)."""
        weights = np.zeros(self.job.stages)
        matrix = self.job.shape.vocab_size * self.job.shape.hidden / self.job.tp
        weights[0] += matrix
        weights[-1] += matrix
        return weights

    def _over_shards(self, whole_bytes: float) -> float:
        job = self.job
        ranks = job.dp * job.cp
        link = group_link(job.hardware, "all_gather", ranks, stride=job.tp)
        return float(link.seconds(shard_bytes(whole_bytes, ranks)))

    def _by_rank(self, of_stage: NDArray[np.float64]) -> NDArray[np.float64]:
        job = self.job
        stages = [stages_of_rank(job.schedule, rank, job.pp, job.virtual_pp) for rank in range(job.pp)]
        return np.array([of_stage[list(mine)].sum() for mine in stages])
