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
from wlb.simulate.job import SimulatedJob
from wlb.workload import Workload, make_workload
from wlb.workload.base import EXCHANGES, Seconds
from wlb.workload.links import Traffic, group_link, shard_bytes
from wlb.workload.weights import expert_weights, mean_block_weights

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")

# Of tensor-parallel collectives that are divided and overlap with matrix products; fitted by benchmarks/fit_prices.py.
_SHOWN_OF_ASYNC_TP = 0.6

# Bytes read and written for each score by the loss in float32: log-softmax reads them twice, as a row of scores is too
# long to be kept, and writes; the backward clears a gradient, reads it and the log-probabilities twice, and writes that
# of the score. Scores of another type are widened before, and their gradients narrowed. Derived by counting. A measured
# profile contains the loss.
_LOSS_BYTES_PER_SCORE = {"forward": 3 * 4, "backward": 4 + 2 * (4 + 4) + 4}
_MASTER_BYTES = 4  # weights, gradients and moments are float32
# Matrix products of few tokens take as long as reading their weights. A backward also reads and writes the gradient in
# float32, to which it adds that of a micro-batch. Derived by counting.
_GRADIENT_PASSES = {"forward": 0, "backward": 2}
# Float32 values touched for each weight: gradients for their norm, read and written by clipping, and AdamW's reads and
# writes of weight, gradient and both moments. Derived by counting, each kernel fused.
_OPTIMIZER_VALUES = 1 + 2 + 7


class JobCosts:
    """Prices of one job; arrays in, arrays of the same shape out.

    A context-parallel group lies on ``nodes`` nodes, by default on as few as hold it.
    """

    def __init__(self, job: SimulatedJob, nodes: int | None = None) -> None:
        self.job, self.layout, self._nodes = job, job.layout, nodes
        self._parallel = make_workload(job.shape, job.hardware, tp=self.layout.tp)
        self._alone = make_workload(job.shape, job.hardware.unlinked, tp=self.layout.tp)
        profile = job.pricing.profile
        self._compute: Workload = profile.workload() if profile else self._alone
        self._share = profile.tp / self.layout.tp if profile else 1.0

    def attention(self, starts: ArrayLike, stops: ArrayLike, direction: Direction) -> Seconds:
        """Of pieces of documents: queries ``starts`` to ``stops``, keys 0 to ``stops``."""
        return self._share * self._compute.piece_seconds(starts, stops, direction)

    def attention_drain(self, stops: ArrayLike, direction: Direction) -> Seconds:
        """What a rank's attention takes beside its pieces, the longest of which reaches to key ``stops``."""
        return self._compute.drain_seconds(stops, direction)

    def blocks(self, tokens: ArrayLike, direction: Direction) -> Seconds:
        """W_l of ``tokens`` tokens without collectives, output head and loss."""
        if self.job.pricing.profile is not None:
            return self._profiled(tokens, direction) * (1 - self._head_share(direction))
        return self._at_least_moving(
            self._own_weights, tokens, self._headless.linear_seconds(tokens, direction), direction
        )

    def head(self, tokens: ArrayLike, direction: Direction) -> Seconds:
        """Output head and loss of ``tokens`` tokens."""
        if self.job.pricing.profile is not None:
            return self._profiled(tokens, direction) * self._head_share(direction)
        seconds = np.asarray(tokens) * self._head_token_seconds(direction)
        return self._at_least_moving(self.job.shape.vocab_size * self.job.shape.hidden, tokens, seconds, direction)

    def tensor_collectives(self, tokens: ArrayLike, direction: Direction) -> Seconds:
        """Gathering and reducing the residual stream over the tensor-parallel group."""
        together = self._parallel.linear_seconds(tokens, direction)
        links: Seconds = together - self._alone.linear_seconds(tokens, direction)
        shown = _SHOWN_OF_ASYNC_TP if self.job.pricing.software.async_tp else 1.0
        return shown * np.maximum(links, 0.0)  # rounding leaves less than nothing where there is no group

    def expert_exchange(self, tokens: ArrayLike) -> Seconds:
        """Sending tokens to the ranks that have their experts, and back: in a forward, or in a backward."""
        job, experts = self.job, self.job.shape.experts
        ranks = job.pricing.software.expert_parallel
        if experts is None or ranks == 1:
            return np.zeros(np.shape(tokens))
        layers = sum(count for kind, count in job.shape.blocks.items() if kind.routed)
        nodes = -(-ranks // job.hardware.node_size)
        link = group_link(job.hardware, "all_to_all", min(ranks, job.hardware.node_size), stride=1)
        copy = np.asarray(tokens) * job.shape.hidden * job.hardware.bytes_per_value / self.layout.tp
        seconds = link.seconds(shard_bytes(experts.active, ranks) * copy)
        if nodes > 1:
            reached = (nodes - 1) * (
                1 - (1 - 1 / nodes) ** experts.active
            )  # other nodes, to each of which it goes once
            between = group_link(job.hardware, "point_to_point", ranks, stride=1)
            seconds = np.maximum(seconds, between.seconds(reached * copy))
        return 2 * layers * seconds

    def exchange(self, tokens: ArrayLike) -> Seconds:
        """Keys and values, or their gradients, between ranks of which the busiest moves ``tokens`` tokens."""
        return self._parallel.kv_gather_seconds(tokens, self.layout.cp, self._nodes) / EXCHANGES

    def copies(
        self, sent: ArrayLike, received: ArrayLike, merged: ArrayLike, direction: Direction, alone: ArrayLike = False
    ) -> Seconds:
        """What a rank spends in its memory on what it exchanges, and on merging the results of ``merged`` queries."""
        return self._parallel.kv_copy_seconds(sent, received, merged, direction, alone)

    def transfer(self, tokens: ArrayLike) -> Seconds:
        """The residual stream of ``tokens`` tokens to a neighbouring pipeline rank; not of all layers, one message."""
        job = self.job
        stride = self.layout.tp * self.layout.replicas
        link = group_link(job.hardware, "point_to_point", self.layout.pp, stride)
        token_bytes = job.shape.hidden * job.hardware.bytes_per_value / self.layout.tp
        return link.seconds(np.asarray(tokens) * token_bytes)

    @cached_property
    def stage_shares(self) -> NDArray[np.float64]:
        """The part of all blocks that each stage holds; shape (stages,)."""
        return self.stage_blocks / self.job.shape.layers

    @cached_property
    def stage_blocks(self) -> NDArray[np.int64]:
        return np.array([len(layers) for layers in split_layers(self.job.shape, self.layout.stages)])

    @cached_property
    def block_gather(self) -> float:
        """Gathering one block's weights over the ranks that share them."""
        return self._over_shards(self._own_block_weights * self.job.hardware.bytes_per_value)

    @cached_property
    def block_copy(self) -> float:
        """Copying one block's weights out of what was gathered: reading and writing them."""
        sharing, hardware = self.layout.replicas > 1, self.job.hardware
        return sharing * 2 * self._own_block_weights * hardware.bytes_per_value / hardware.memory_bandwidth

    @cached_property
    def block_reduction(self) -> float:
        """Reducing and scattering one block's gradients."""
        return self._over_shards(self._own_block_weights * _MASTER_BYTES)

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
        weights = self._by_rank(self.stage_blocks * self._block_weights + self._root_weights) / (self.layout.replicas)
        gpus = self.layout.world_size
        norm = 0.0 if gpus == 1 else group_link(job.hardware, "point_to_point", gpus, 1).latency
        hardware = job.hardware
        return weights * _OPTIMIZER_VALUES * _MASTER_BYTES / hardware.memory_bandwidth + norm

    @cached_property
    def _own_weights(self) -> float:
        """Weights of all blocks that a tensor-parallel group has: its experts, and everything else."""
        all_weights = self.job.shape.layers * mean_block_weights(self.job.shape)
        experts = expert_weights(self.job.shape)
        return all_weights - experts + experts / self.job.pricing.software.expert_parallel

    @cached_property
    def _headless(self) -> Workload:
        return make_workload(
            replace(self.job.shape, vocab_size=self.layout.tp), self.job.hardware.unlinked, tp=self.layout.tp
        )

    def _profiled(self, tokens: ArrayLike, direction: Direction) -> Seconds:
        return self._share * self._compute.linear_seconds(tokens, direction)

    def _at_least_moving(self, weights: float, tokens: ArrayLike, seconds: Seconds, direction: Direction) -> Seconds:
        """``seconds``, or what reading the ``weights`` takes that few tokens are multiplied by; nothing for no tokens.

        A backward adds its gradient to that of earlier micro-batches, which reads and writes it in float32.
        """
        hardware = self.job.hardware
        second_bytes = hardware.memory_bandwidth * self.layout.tp
        reading = weights * hardware.bytes_per_value / second_bytes
        adding = weights * _GRADIENT_PASSES[direction] * _MASTER_BYTES / second_bytes
        return np.where(np.asarray(tokens) > 0, np.maximum(seconds, reading) + adding, 0.0)

    def _head_token_seconds(self, direction: Direction) -> float:
        """Output head and loss of one token, by the hardware's rates."""
        (with_head, without) = (
            float(np.diff(workload.linear_seconds([1, 2], direction))[0]) for workload in (self._alone, self._headless)
        )
        hardware = self.job.hardware
        value_bytes = hardware.bytes_per_value
        converting = 0 if value_bytes == _MASTER_BYTES else value_bytes + _MASTER_BYTES
        score_bytes = _LOSS_BYTES_PER_SCORE[direction] + converting
        loss = self.job.shape.vocab_size * score_bytes / hardware.memory_bandwidth
        return with_head - without + loss / self.layout.tp

    def _head_share(self, direction: Direction) -> float:
        """Output head and loss, of everything outside attention: a profile is divided in the hardware's proportion."""
        head = self._head_token_seconds(direction)
        return head / (head + float(np.diff(self._headless.linear_seconds([1, 2], direction))[0]))

    @property
    def _own_block_weights(self) -> float:
        """Weights of a block on one tensor-parallel rank, of the experts only its own; the mean of blocks."""
        return self._own_weights / self.job.shape.layers / self.layout.tp

    @cached_property
    def _block_weights(self) -> float:
        """Weights of a block on one tensor-parallel rank, all experts included; the mean of blocks that differ."""
        return mean_block_weights(self.job.shape) / self.layout.tp

    @cached_property
    def _root_weights(self) -> NDArray[np.float64]:
        """Embedding and output head, on one tensor-parallel rank of each stage; shape (stages,)."""
        weights = np.zeros(self.layout.stages)
        matrix = self.job.shape.vocab_size * self.job.shape.hidden / self.layout.tp
        weights[0] += matrix
        weights[-1] += matrix
        return weights

    def _over_shards(self, whole_bytes: float) -> float:
        job = self.job
        ranks = self.layout.replicas
        traffic: Traffic = "all_to_all" if job.pricing.software.fetches_shards else "all_gather"
        link = group_link(job.hardware, traffic, ranks, stride=self.layout.tp)
        return float(link.seconds(shard_bytes(whole_bytes, ranks)))

    def _by_rank(self, of_stage: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([of_stage[mine].sum() for mine in self.layout.rank_stages])
