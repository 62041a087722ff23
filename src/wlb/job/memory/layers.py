"""What each layer of the model holds and needs, in bytes, on one tensor-parallel rank.

Counted tensor by tensor for the model that ``wlb.training`` trains, after the method of Korthikanti et al., arXiv
2205.05198, section 4; ``tests/job/memory/test_layers.py`` compares them with what PyTorch allocates. What experts,
latent attention and linear attention hold beside that is counted in the same way, but nothing here runs them to compare
with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from wlb.schedules.layout import Layout
from wlb.workload.base import Checkpointing
from wlb.workload.shapes import DENSE, BlockKind, ModelShape
from wlb.workload.weights import block_weights, feed_forward_width


@dataclass(frozen=True)
class MemorySettings:
    """What memory depends on beside the lengths of micro-batches.

    ``stage_blocks`` counts the blocks of every pipeline stage, ``micro_batches`` those of a data-parallel rank's step.
    Weights and their gradients take ``compute_bytes`` or 4 bytes, whichever is more. ``fused_norms`` says that RMSNorm
    keeps its input only, as PyTorch's CUDA kernel does; on CPU it is made of several operations.
    ``uneven_shards`` is the most tokens that a context-parallel rank holds over their mean. With ``checkpoint_copy`` a
    copy of weights and moments may be held while it is written. ``keeps_weights`` says that a job without a pipeline
    gathers weights once a step, as one with a pipeline does. At most ``most_exchanged`` tokens of a micro-batch have
    their keys and values exchanged; by default all.
    """

    shape: ModelShape
    stage_blocks: tuple[int, ...]
    parallel: Layout
    micro_batches: int
    compute_bytes: int
    activation_checkpointing: Checkpointing = "none"
    fused_norms: bool = False
    tied_embeddings: bool = False
    uneven_shards: float = 1.0
    checkpoint_copy: bool = False
    keeps_weights: bool = False
    most_exchanged: int | None = None

    @property
    def master_bytes(self) -> int:
        return max(self.compute_bytes, 4)


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

    def __init__(self, settings: MemorySettings, rows: int, exchange: Exchange | None = None) -> None:
        shape, parallel = settings.shape, settings.parallel
        self.settings = settings
        self.rows = rows
        self.exchange = exchange or _largest_exchange(settings, rows)
        self.compute, self.master = settings.compute_bytes, settings.master_bytes
        tp = parallel.tp
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
        """What RMSNorm keeps: its input; composed of several operations, also the input over its norm."""
        hidden = self.settings.shape.hidden
        if self.settings.fused_norms:
            return rows * (hidden * self.compute + self.master)
        return rows * (2 * hidden * self.master + self.master)  # a half-precision input is kept as float32

    def blocks(self, layers: range) -> list[Unit]:
        """The blocks of these numbers, in order."""
        kinds = [self.settings.shape.block_kind(layer) for layer in layers]
        of_kind = {kind: self.block(kind) for kind in set(kinds)}
        return [of_kind[kind] for kind in kinds]

    def block(self, kind: BlockKind = DENSE) -> Unit:
        """One block; one with a window counts as one without."""
        shape, settings, rows = self.settings.shape, self.settings, self.rows
        attention_out = rows * self.out * self.compute
        received = self.exchange.kept * self.exchanged * self.compute
        kept_attention = attention_out + self.log_sum_exp + received
        projected = self._projected()
        wide = rows * (feed_forward_width(shape, kind) // settings.parallel.tp) * self.compute
        routed = self._routed() if kind.routed else 0
        everything = 2 * (self.norm + self.gathered) + projected + kept_attention + 4 * wide + routed
        last_half = self.norm + self.gathered + 4 * wide + routed  # released before attention's backward begins

        work_forward, work_backward = self._attention_work()
        attending = self.norm + self.gathered + projected + kept_attention + work_forward
        # Of SwiGLU: its last product, then the gate, then the first two products, when four results are two gradients.
        # The gradients of their matrices wait for the end of the block where they are to be added up in a wider type.
        narrower = self.compute < self.master
        matrix = shape.hidden * (feed_forward_width(shape, kind) // settings.parallel.tp) * self.compute * narrower
        narrowing, gating = self.partial_sums + wide + matrix, 2 * wide + matrix
        widening = 2 * self.partial_sums - 2 * wide + 3 * matrix
        backward = max(
            self.stream + max(narrowing, gating, widening),
            2 * self.stream + 2 * attention_out + projected + work_backward - last_half + 3 * matrix,
        )
        weights = -(-block_weights(shape, kind) // settings.parallel.tp) + 2 * shape.hidden
        if settings.activation_checkpointing == "none":
            forward = max(everything + 3 * self.stream + self.partial_sums, attending)
            return Unit(weights, weights, everything, forward, backward, received=received)
        selective = settings.activation_checkpointing == "selective"
        held = self.stream + (kept_attention if selective else 0)
        feeding_forward = self.stream + self.partial_sums + self.gathered + 3 * wide
        again = everything + backward if selective else max(everything + backward, attending)
        return Unit(
            weights,
            weights,
            held,
            held + max(feeding_forward, attending - self.norm),
            again - held,
            received=received if selective else 0,
        )

    def _projected(self) -> int:
        """What attention's projections leave for its backward."""
        latent, width = self.settings.shape.latent, self.query + self.key_value
        if latent is not None:
            width += 2 * (latent.q_rank + latent.kv_rank) + latent.rope_dim  # before and after their norms
        return self.rows * width * self.compute

    def _routed(self) -> int:
        """A token as each of its experts gets it, and what they return, and its scores for all of them.

        Experts are divided over tensor-parallel ranks, and tokens over experts.
        """
        shape, experts = self.settings.shape, self.settings.shape.experts
        assert experts is not None
        rows = -(-self.rows // self.settings.parallel.tp)
        return rows * (2 * experts.active * shape.hidden * self.compute + experts.count * self.master)

    def _attention_work(self) -> tuple[int, int]:
        """What attention allocates beyond its results, forward and backward (tested in tests/attention/test_memory.py).

        A run's result lies beside its place for a moment. Under context parallelism a rank sends, receives and lines up
        keys and values; where these are latents, it expands them too.
        """
        own = self.rows * self.out * self.compute + self.log_sum_exp
        own_grads = self.rows * (self.query + self.key_value) * self.compute
        if self.settings.parallel.cp == 1:
            return own, own_grads
        moved = self.exchange.moved * self.compute
        exchanged = 3 * moved * self.exchanged
        expanded = moved * self.key_value if self.settings.shape.latent is not None else 0
        return own + 2 * own + exchanged + expanded, own_grads + 4 * own + 2 * (exchanged + expanded)

    def embedding(self) -> Unit:
        """The lookup keeps token ids only.

        Every tensor-parallel rank computes the gradient of the whole matrix, and adds it up over the step, before it
        takes its part (DTensor's ``embedding_dense_backward``, torch 2.13).
        """
        shape = self.settings.shape
        matrix = shape.vocab_size * shape.hidden
        weights = matrix // self.settings.parallel.tp
        return Unit(weights, matrix, 0, self.gathered, matrix * self.compute, root=True)

    def head(self) -> Unit:
        """Final norm, scores, and the loss: log-probabilities are kept, and their two gradients come on top.

        Where the vocabulary is split, the loss is composed of operators, whose results are one more of each (DTensor's
        ``loss_parallel``, torch 2.13).
        """
        settings, shape = self.settings, self.settings.shape
        scores = self.rows * shape.vocab_size // settings.parallel.tp
        matrix = shape.vocab_size * shape.hidden // settings.parallel.tp
        pipelined = scores * self.compute if settings.parallel.pp > 1 else 0  # the stage keeps its output
        held = self.norm + self.gathered + scores * self.master + pipelined
        tied = settings.tied_embeddings and len(settings.stage_blocks) == 1
        between = scores * self.master if settings.parallel.tp > 1 else 0
        backward = max(2 * scores * self.master + between, scores * self.compute + matrix * self.compute)
        weights = (0 if tied else matrix) + shape.hidden
        return Unit(
            weights,
            weights,
            held,
            held + scores * self.master + between,
            backward,
            scores=scores * self.master + pipelined,
            root=True,
        )

    def ends(self) -> int:
        """What a stage keeps beside its layers: rotary angles, and what it sent on; a block keeps what it received."""
        shape, parallel = self.settings.shape, self.settings.parallel
        angles = 2 * self.rows * shape.head_dim * self.compute
        return angles + (self.stream if parallel.pp > 1 else 0)


def _largest_exchange(settings: MemorySettings, rows: int) -> Exchange:
    """At most the tokens of an even share are kept, and at most all other ranks' tokens are moved."""
    others = settings.parallel.cp - 1
    moved = others * rows if settings.most_exchanged is None else min(others * rows, settings.most_exchanged)
    return Exchange(math.ceil(rows / settings.uneven_shards) if others else 0, moved)
