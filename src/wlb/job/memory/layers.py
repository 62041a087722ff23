"""What each layer of the model holds and needs, in bytes, on one tensor-parallel rank.

Counted tensor by tensor for the model that ``wlb.training`` trains, after the method of Korthikanti et al., arXiv
2205.05198, section 4; ``tests/job/memory/test_layers.py`` compares them with what PyTorch allocates. What experts,
latent attention hold beside that is counted in the same way, but nothing here runs them to compare
with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from wlb.job.job import Job
from wlb.workload.costs import MASTER_BYTES
from wlb.workload.shapes import DENSE, BlockKind
from wlb.workload.weights import block_weights, feed_forward_width

# wlb.runtime.loss has so many rows of scores in a wide type at a time, and keeps of each its label and its sum.
_CHUNK_ROWS, _ROW_BYTES = 1024, 13
_ROWS = 1024  # of a micro-batch, of which shares are taken
_SLICED = 1 / 3  # of the tokens in flight, at most, that are in slices


@dataclass(frozen=True)
class Unit:
    """Something a stage runs: elements of its weights and of their gradient on this rank, and its bytes for some rows.

    ``forward`` and ``backward`` are what it needs at most beyond what is held when they begin, ``held`` what forward
    leaves for backward, of which ``scores`` are in the vocabulary's width and ``received`` are keys and values of other
    ranks. ``root`` units are gathered with the stage.
    """

    weights: int
    gradient: int  # before it is reduced
    held: int
    forward: int
    backward: int
    scores: int = 0
    received: int = 0
    root: bool = False


class Exchange(NamedTuple):
    """Tokens of other ranks whose keys and values a rank keeps for the backward, and the most that it sends or gets."""

    kept: int
    moved: int


class LayerMemory:
    """Bytes of each kind of layer on one tensor-parallel rank, for a micro-batch of some rows.

    Rows are shared by tensor-parallel ranks in norms and in the residual stream, and whole between. Without an
    ``exchange`` it is the largest that a plan may ask for.
    """

    def __init__(self, job: Job, rows: int, exchange: Exchange | None = None) -> None:
        shape, tp = job.shape, job.layout.tp
        self.job = job
        self.rows = rows
        self.exchange = exchange or _largest_exchange(job, rows)
        self.compute, self.master = job.hardware.bytes_per_value, master_bytes(job)
        self.query = shape.heads * shape.head_dim // tp
        self.key_value = shape.kv_heads * (shape.head_dim + shape.value_dim) // tp
        self.out = shape.heads * shape.value_dim // tp
        latent = shape.latent  # which travels in place of keys and values, whole to every tensor-parallel rank
        self.exchanged = self.key_value if latent is None else latent.kv_rank + latent.rope_dim
        self.log_sum_exp = rows * shape.heads // tp * self.master
        self.stream = -(-rows // tp) * shape.hidden * self.compute
        self.gathered = rows * shape.hidden * self.compute
        self.norm = self._norm(-(-rows // tp)) + (self.stream if tp > 1 else 0)  # its output, besides the gathered one
        self.partial_sums = self.gathered if tp > 1 else 0  # of the whole width, before they are reduced and scattered

    def _norm(self, rows: int) -> int:
        """What RMSNorm keeps: its input; on CPU, where it is several operations, also the input over its norm."""
        hidden = self.job.shape.hidden
        if self.job.hardware.device_type == "cuda":
            return rows * (hidden * self.compute + self.master)
        return rows * (2 * hidden * self.master + self.master)  # a half-precision input is kept as float32

    def blocks(self, layers: range) -> list[Unit]:
        """The blocks of these numbers, in order."""
        kinds = [self.job.shape.block_kind(layer) for layer in layers]
        of_kind = {kind: self.block(kind) for kind in set(kinds)}
        return [of_kind[kind] for kind in kinds]

    def block(self, kind: BlockKind = DENSE) -> Unit:
        """One block; one with a window counts as one without."""
        shape, tp, rows = self.job.shape, self.job.layout.tp, self.rows
        attention_out = rows * self.out * self.compute
        received = self.exchange.kept * self.exchanged * self.compute
        kept_attention = attention_out + self.log_sum_exp + received
        projected = self._projected()
        wide = rows * (feed_forward_width(shape, kind) // tp) * self.compute
        routed = self._routed() if kind.routed else 0
        everything = 2 * (self.norm + self.gathered) + projected + kept_attention + 4 * wide + routed
        last_half = self.norm + self.gathered + 4 * wide + routed  # released before attention's backward begins

        work_forward, work_backward = self._attention_work()
        attending = self.norm + self.gathered + projected + kept_attention + work_forward
        # Of SwiGLU: its last product, then the gate, then the first two products, when four results are two gradients.
        # The gradients of their matrices wait for the end of the block where they are to be added up in a wider type.
        narrower = self.compute < self.master
        matrix = shape.hidden * (feed_forward_width(shape, kind) // tp) * self.compute * narrower
        narrowing, gating = self.partial_sums + wide + matrix, 2 * wide + matrix
        widening = 2 * self.partial_sums - 2 * wide + 3 * matrix
        backward = max(
            self.stream + max(narrowing, gating, widening),
            2 * self.stream + 2 * attention_out + projected + work_backward - last_half + 3 * matrix,
        )
        weights = -(-block_weights(shape, kind) // tp) + 2 * shape.hidden
        if self.job.activation_checkpointing == "none":
            forward = max(everything + 3 * self.stream + self.partial_sums, attending)
            return Unit(weights, weights, everything, forward, backward, received=received)
        held, again = self.stream, everything + backward
        if self.job.activation_checkpointing == "keep_attention":
            held += kept_attention
        else:
            again, received = max(again, attending), 0
        feeding_forward = self.stream + self.partial_sums + self.gathered + 3 * wide
        forward = held + max(feeding_forward, attending - self.norm)
        return Unit(weights, weights, held, forward, again - held, received=received)

    def _projected(self) -> int:
        """What attention's projections leave for its backward."""
        latent, width = self.job.shape.latent, self.query + self.key_value
        if latent is not None:
            width += 2 * (latent.q_rank + latent.kv_rank) + latent.rope_dim  # before and after their norms
        return self.rows * width * self.compute

    def _routed(self) -> int:
        """A token as each of its experts gets it, and what they return, and its scores for all of them.

        Experts are divided over tensor-parallel ranks, and tokens over experts.
        """
        shape, experts = self.job.shape, self.job.shape.experts
        assert experts is not None
        rows = -(-self.rows // self.job.layout.tp)
        return rows * (2 * experts.active * shape.hidden * self.compute + experts.count * self.master)

    def _attention_work(self) -> tuple[int, int]:
        """What attention allocates beyond its results, forward and backward (tested in tests/attention/test_memory.py).

        A run's result lies beside its place for a moment. Under context parallelism a rank sends, receives and lines up
        keys and values, and merges parts in a wide type; where these are latents, it expands them too.
        """
        own = self.rows * self.out * self.compute + self.log_sum_exp
        own_grads = self.rows * (self.query + self.key_value) * self.compute + self._kernel_workspace()
        if self.job.layout.cp == 1:
            return own, own_grads
        moved = self.exchange.moved * self.compute
        exchanged = 3 * moved * self.exchanged
        expanded = moved * self.key_value if self.job.shape.latent is not None else 0
        merged = self.rows * self.out * self.master if self.compute < self.master else 0
        return own + 2 * own + merged + exchanged + expanded, own_grads + 4 * own + 2 * (exchanged + expanded)

    def _kernel_workspace(self) -> int:
        """What FlashAttention-2's backward allocates on a GPU beside gradients (``mha_varlen_bwd``, torch 2.13).

        Gradients of queries in float32, and where heads are grouped, of keys and values for every query head. What is
        received comes in parts, the largest of at most half of it where a rank may receive more than its own tokens.
        """
        if self.job.hardware.device_type != "cuda":
            return 0
        keys = max(self.rows, self.exchange.moved // 2)
        expanded = 2 * keys * self.query * self.compute if self.job.shape.kv_heads < self.job.shape.heads else 0
        return self.rows * self.query * self.master + expanded

    def embedding(self) -> Unit:
        """The lookup keeps token ids only.

        Every tensor-parallel rank computes the gradient of the whole matrix, and adds it up over the step, before it
        takes its part (DTensor's ``embedding_dense_backward``, torch 2.13).
        """
        shape = self.job.shape
        matrix = shape.vocab_size * shape.hidden
        weights = matrix // self.job.layout.tp
        return Unit(weights, matrix, 0, self.gathered, matrix * self.compute, root=True)

    def head(self) -> Unit:
        """Final norm, scores, and the loss, which keeps the scores and makes their gradient chunk by chunk.

        Where the vocabulary is split, the loss is composed of operators (DTensor's ``loss_parallel``, torch 2.13):
        log-probabilities are kept, and two gradients and what comes between are on top.
        """
        shape, layout = self.job.shape, self.job.layout
        scores = self.rows * shape.vocab_size // layout.tp
        matrix = shape.vocab_size * shape.hidden // layout.tp
        if layout.tp == 1:
            chunk = min(self.rows, _CHUNK_ROWS) * shape.vocab_size * self.master
            kept, loss = scores * self.compute + _ROW_BYTES * self.rows, chunk if self.compute < self.master else 0
            losing = scores * self.compute + chunk
        else:
            pipelined = scores * self.compute if layout.pp > 1 else 0  # the stage keeps its output
            kept, loss = scores * self.master + pipelined, 2 * scores * self.master
            losing = 3 * scores * self.master
        held = self.norm + self.gathered + kept
        tied = self.job.tied_embeddings and layout.stages == 1
        backward = max(losing, scores * self.compute + matrix * self.compute)
        weights = (0 if tied else matrix) + shape.hidden
        return Unit(weights, weights, held, held + loss, backward, scores=kept, root=True)

    def ends(self) -> int:
        """What a stage keeps beside its layers: rotary angles, and what it sent on; a block keeps what it received."""
        angles = 2 * self.rows * self.job.shape.head_dim * self.compute
        return angles + (self.stream if self.job.layout.pp > 1 else 0)


def held_of_token(job: Job) -> float:
    """Bytes that a block keeps of a token for its backward, on each rank of the group that shares the token's rows."""
    return LayerMemory(job, _ROWS).block().held / (_ROWS * job.layout.cp)


def kept_share(job: Job) -> float:
    """Keys and values that a rank keeps of a slice, over all else that a block keeps of it.

    For later slices those that all its group holds, and for its own backward those that it received.
    """
    layers = LayerMemory(job, _ROWS)
    kept = (2 * job.layout.cp - 1) * _ROWS * layers.exchanged * layers.compute
    return kept / layers.blocks(range(1))[0].held


def kept_tokens(job: Job, in_flight: float) -> float:
    """Tokens in slices of those ``in_flight``, counted once for each block: a part, or a document if that is more."""
    return max(window_tokens(job), _SLICED * in_flight) if job.slices_documents else 0.0


def window_tokens(job: Job) -> int:
    """A document of a context window on a pipeline rank, counted once for each of its blocks."""
    return job.context_window * max(int(job.stage_blocks[mine].sum()) for mine in job.layout.rank_stages)


def head_share(job: Job) -> float:
    """What the output head and the loss keep of a token, over what a block does."""
    layers = LayerMemory(job, _ROWS)
    return layers.head().held / layers.blocks(range(1))[0].held


def master_bytes(job: Job) -> int:
    """Of a weight, a moment, or a gradient that is added up: float32 or wider."""
    return max(job.hardware.bytes_per_value, MASTER_BYTES)


def _largest_exchange(job: Job, rows: int) -> Exchange:
    """At most the tokens of an even share are kept, and all other ranks' tokens moved: those of one document."""
    if job.layout.cp == 1:
        return Exchange(0, 0)
    moved = (job.layout.cp - 1) * rows
    if job.levels_steps:  # in which a micro-batch that is shared has one document
        moved = min(moved, job.context_window)
    return Exchange(math.ceil(rows / job.largest_shard), moved)
