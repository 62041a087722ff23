"""What each layer of the model holds and needs, in bytes, on one tensor-parallel rank.

Counted tensor by tensor for the model that ``wlb.training`` trains, after the method of Korthikanti et al., arXiv
2205.05198, section 4; ``tests/job/memory/test_layers.py`` compares with what PyTorch allocates. Experts on other GPUs
and latent attention are counted in the same way, but not compared. Linear layers hold what flash-linear-attention and
state-spaces/mamba save for the backward, counted in their sources; over chosen tokens heads attend the latent itself.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wlb.job.job import Job
from wlb.workload.costs import MASTER_BYTES, PRODUCT_ROWS
from wlb.workload.shapes import DENSE, BlockKind
from wlb.workload.weights import block_weights, expert_weights, feed_forward_width, routed_layers

# wlb.runtime.loss converts this many rows of scores to a wide type at a time, and keeps a label, a sum and two marks of
# each row.
_CHUNK_ROWS, _ROW_BYTES = 1024, 14
_INDEX_BYTES = 8
# What a linear layer keeps before its output, in widths of its keys and of its values: inputs of the convolution and of
# the kernels, gates, and matrices of chunks.
_KEPT_LINEAR = {"mamba2": (2, 3), "gated_delta": (4, 5), "kda": (5, 5)}
_CHOSEN_BYTES = 4  # index of a token that an indexer chose
_ROWS = 1024  # of a micro-batch from which shares are computed
THOUSANDTHS = 1000
_SLICED = 1 / 3  # largest share of tokens in flight that are in slices


@dataclass(frozen=True)
class Unit:
    """A module that a stage runs: elements of its weights and gradients on this rank, and its bytes for some rows.

    ``experts`` are the part of its weights in experts that other GPUs do not have. ``forward`` and ``backward`` are the
    most bytes that they need beyond what is held when they begin. ``held`` are the bytes that a forward leaves for its
    backward, including ``scores`` over the vocabulary and ``received`` keys and values of other ranks. ``root`` units
    are gathered with the stage.
    """

    weights: int
    gradient: int  # before it is reduced
    held: int
    forward: int
    backward: int
    scores: int = 0
    received: int = 0
    root: bool = False
    experts: int = 0


class Exchange(NamedTuple):
    """Tokens of other ranks whose keys and values a rank keeps for the backward; most tokens it sends or receives."""

    kept: int
    moved: int


class LayerMemory:
    """Bytes of each kind of layer on one tensor-parallel rank, for a micro-batch of ``rows`` tokens.

    Tensor-parallel ranks share rows in norms and in the residual stream, and hold all rows in between. ``exchange``
    defaults to the largest that a plan may need.
    """

    def __init__(self, job: Job, rows: int, exchange: Exchange | None = None) -> None:
        self.job, self.shape, self.layout, self.rows = job, job.shape, job.layout, rows
        shape, tp, own_rows = job.shape, job.layout.tp, -(-rows // job.layout.tp)
        self.exchange = exchange or _largest_exchange(job, rows)
        self.compute, self.master = job.hardware.bytes_per_value, master_bytes(job)
        self.later = job.plans_operations and job.splits_backward  # gradients of weights
        self.busiest = job.costs.expert_imbalance if job.layout.ep > 1 else 1.0  # rows of experts, over the mean GPU's
        self.query = shape.heads * shape.head_dim // tp
        self.key_value = shape.kv_heads * (shape.head_dim + shape.value_dim) // tp
        self.out = shape.heads * shape.value_dim // tp
        latent = shape.latent  # exchanged in place of keys and values, whole on every tensor-parallel rank
        self.exchanged = self.key_value if latent is None else latent.kv_rank + latent.rope_dim
        if shape.indexer is not None and latent is not None:
            self.exchanged += shape.indexer.head_dim
            self.query += shape.heads * (latent.kv_rank + latent.rope_dim) // tp
            self.out += shape.heads * latent.kv_rank // tp
            self.key_value = self.exchanged
        self.log_sum_exp = rows * shape.heads // tp * self.master
        self.stream = own_rows * shape.hidden * self.compute
        self.gathered = rows * shape.hidden * self.compute
        # RMSNorm keeps its input; on CPU, where it is several operations, as float32, with the normalised input.
        on_gpu = job.hardware.device_type == "cuda"
        normed = shape.hidden * (self.compute if on_gpu else 2 * self.master) + self.master
        self.norm = own_rows * normed + (self.stream if tp > 1 else 0)  # with its output before the gather
        self.partial_sums = self.gathered if tp > 1 else 0  # of the whole width, before reduce-scatter

    def blocks(self, layers: range) -> list[Unit]:
        """The blocks of these numbers, in order."""
        kinds = [self.shape.block_kind(layer) for layer in layers]
        of_kind = {kind: self.block(kind) for kind in set(kinds)}
        return [of_kind[kind] for kind in kinds]

    def block(self, kind: BlockKind = DENSE) -> Unit:
        """One block; a sliding window is ignored."""
        shape, tp, rows = self.shape, self.layout.tp, self.rows
        attends, halves = kind.attends, 1 + kind.feeds_forward
        attention_out = rows * self.out * self.compute * attends + self._linear(kind, 0, 1)
        received = self.exchange.kept * self.exchanged * self.compute * attends
        log_sum_exp = self.log_sum_exp * attends
        kept_attention = attention_out + log_sum_exp + received
        projected = self._projected() * attends
        projected += 0 if shape.linear is None else self._linear(kind, *_KEPT_LINEAR[shape.linear.kind])
        busiest = self.busiest if kind.routed else 1.0
        wide = math.ceil(busiest * rows) * (feed_forward_width(shape, kind) // tp) * self.compute
        sent, scores, routed = self._routed() if kind.routed else (0, 0, 0)
        weighing = 2 * sent + scores  # outputs of experts, and their products with weights
        swiglu = 2 * (shape.ffn_matrices - 1) * wide
        everything = halves * (self.norm + self.gathered) + projected + kept_attention + swiglu + routed
        last_half = (halves - 1) * (self.norm + self.gathered) + swiglu + routed  # released before attention's backward
        if self.later:  # of which the rest is ``kept``
            last_half = -(self.norm + log_sum_exp + received)

        work_forward, work_backward = self._attention_work() if attends else (0, 0)
        work_forward += self._linear(kind, 0, 3)  # states of chunks
        work_backward += self._linear(kind, 2, 9)  # gradients too, and what is computed again
        attending = self.norm + self.gathered + projected + kept_attention + work_forward
        # SwiGLU goes backward through its last product, the gate, and its first two products, which turn four results
        # into two gradients. Gradients of weights stay to the end of the block if accumulated in a wider type.
        narrower = self.compute < self.master
        matrix = shape.hidden * (feed_forward_width(shape, kind) // tp) * self.compute * narrower
        narrowing, gating = self.partial_sums + wide + matrix, 2 * wide + matrix
        widening = 2 * self.partial_sums - 2 * wide + 3 * matrix
        backward = max(
            self.stream + max(narrowing, gating, widening, weighing),
            2 * self.stream + 2 * attention_out + projected + work_backward - last_half + 3 * matrix,
        )
        ep, experts = self.layout.ep, 0
        if ep > 1 and kind.routed:
            experts = expert_weights(shape) // (routed_layers(shape) * ep)
        others = block_weights(shape, kind) - experts * ep
        weights = -(-others // tp) + experts + halves * shape.hidden
        if self.job.activation_checkpointing == "none":
            forward = max(everything + max(3 * self.stream + self.partial_sums, weighing), attending)
            return Unit(weights, weights, everything, forward, backward, received=received, experts=experts)
        held, again = self.stream, everything + backward
        if self.job.activation_checkpointing == "keep_attention":
            held += kept_attention
        else:
            again, received = max(again, attending), 0
        feeding_forward = self.stream + self.partial_sums + self.gathered + max(3 * wide + sent, 4 * sent)
        feeding_forward += routed - 2 * sent
        forward = held + max(feeding_forward, attending - self.norm)
        return Unit(weights, weights, held, forward, again - held, received=received, experts=experts)

    @property
    def late(self) -> int:
        """What a block keeps until gradients of weights: inputs and gradients of outputs of linear layers."""
        columns = self.out + 3 * (self.shape.ffn_hidden // self.layout.tp)
        return self.later * (4 * self.gathered + self._projected() + self.rows * columns * self.compute)

    def _linear(self, kind: BlockKind, keys: int, values: int) -> int:
        """Bytes of so many widths of the keys and of the values of a linear layer, if the block has one."""
        if (linear := self.shape.linear) is None or not kind.linear:
            return 0
        return self.rows * ((keys * linear.keys + values * linear.values) // self.layout.tp) * self.compute

    def _projected(self) -> int:
        """What the projections of attention leave for the backward."""
        latent, width = self.shape.latent, self.query + self.key_value
        if latent is not None:
            width += 2 * (latent.q_rank + latent.kv_rank) + latent.rope_dim  # before and after their norms
        if (indexer := self.shape.indexer) is None:
            return self.rows * width * self.compute
        queries = indexer.heads * indexer.head_dim * indexer.layers // self.shape.layers
        return self.rows * ((width + queries) * self.compute + indexer.top_k * _CHOSEN_BYTES)

    def _routed(self) -> tuple[int, int, int]:
        """Rows sent to experts, the scores of all experts, and all that routing keeps for the backward.

        It keeps the inputs and outputs of experts, scores before and after the softmax, three sums of them, and of each
        chosen expert its index and place, there and back, and its weight. Experts are divided over tensor-parallel or
        expert-parallel ranks, and tokens over experts.
        """
        shape, experts, layout = self.shape, self.shape.experts, self.layout
        assert experts is not None
        rows = math.ceil(self.busiest * self.rows / layout.tp)
        sent, scores = rows * experts.active * shape.expert_input * self.compute, rows * experts.count * self.master
        indices = (3 if layout.ep == 1 else 5) * _INDEX_BYTES
        chosen = rows * experts.active * (indices + self.master + self.compute)
        return sent, scores, 2 * sent + 2 * scores + chosen + 3 * rows * self.master

    def _attention_work(self) -> tuple[int, int]:
        """What attention allocates beyond its results, forward and backward (tested in tests/attention/test_memory.py).

        A result briefly exists twice, before it is copied into place. Under context parallelism a rank sends, receives
        and reorders keys and values, and merges parts in a wide type; it also expands latents.
        """
        own = self.rows * self.out * self.compute + self.log_sum_exp
        own_grads = self.rows * (self.query + self.key_value) * self.compute + self._kernel_workspace()
        if self.layout.pool_size == 1:
            return own, own_grads
        moved = self.exchange.moved * self.compute
        exchanged = 3 * moved * self.exchanged
        expands = self.shape.latent is not None and self.shape.indexer is None
        expanded = expands * moved * self.key_value
        merged = self.rows * self.out * self.master if self.compute < self.master else 0
        return own + 2 * own + merged + exchanged + expanded, own_grads + 4 * own + 2 * (exchanged + expanded)

    def _kernel_workspace(self) -> int:
        """What the backward of FlashAttention-2 allocates on a GPU beside gradients (``mha_varlen_bwd``, torch 2.13).

        Gradients of queries in float32 and, with grouped heads, gradients of keys and values for every query head.
        Received keys come in parts; if a rank receives more than its own tokens, no part is over half of them.
        """
        if self.job.hardware.device_type != "cuda":
            return 0
        keys = max(self.rows, self.exchange.moved // 2)
        expanded = 2 * keys * self.query * self.compute if self.shape.kv_heads < self.shape.heads else 0
        return self.rows * self.query * self.master + expanded

    def embedding(self) -> Unit:
        """The lookup keeps only token ids.

        Every tensor-parallel rank computes the gradient of the whole matrix, and accumulates it over the step, before
        it takes its part (``embedding_dense_backward`` of DTensor, torch 2.13).
        """
        matrix = self.shape.vocab_size * self.shape.hidden
        return Unit(matrix // self.layout.tp, matrix, 0, self.gathered, matrix * self.compute, root=True)

    def head(self, stage: int = 0) -> Unit:
        """The head on ``stage``: final norm, scores, and the loss.

        The loss keeps the scores and writes their gradient over them, a chunk at a time in a wide type. Gathered tokens
        come whole to every tensor-parallel rank, which has its part of the vocabulary.
        """
        words = -(-self.shape.vocab_size // self.layout.tp)
        matrix, kept = words * self.shape.hidden, self.rows * (words * self.compute + _ROW_BYTES)
        chunk = min(self.rows, _CHUNK_ROWS) * words * self.master
        loss = chunk if self.compute < self.master else 0
        held = self.norm + self.gathered + kept
        backward = max(chunk, matrix * self.compute + self.partial_sums)
        weights = (0 if self.job.tied_embeddings and stage == 0 else matrix) + self.shape.hidden
        return Unit(weights, weights, held, held + loss, backward, scores=kept, root=True)

    def ends(self) -> int:
        """What a stage keeps beside its layers: rotary angles and its output; blocks keep their inputs themselves."""
        angles = 2 * self.rows * self.shape.head_dim * self.compute
        return angles + (self.stream if self.layout.pp > 1 else 0)


class TokenMemory:
    """What a rank keeps of a token for its backward, of many in a micro-batch: bytes of a block, and shares of that."""

    def __init__(self, job: Job) -> None:
        shape, pool = job.shape, job.layout.pool_size
        # The kind of most blocks of a hybrid; in other models a dense block stands for all.
        common = DENSE if shape.pattern is None else max(shape.blocks, key=shape.blocks.__getitem__)
        layers = LayerMemory(job, _ROWS)
        held = layers.block(common).held
        kept = max(held, layers.late)
        self.of_block = kept / (_ROWS * pool)  # bytes, on each rank of the group that shares the token's rows
        self.growth = kept / held  # the most at once, over what the forward leaves
        self.of_head = layers.head().held / kept  # output head and loss
        # Keys and values of a slice: those of the whole group for later slices, and received ones for its own backward.
        exchanged = (2 * pool - 1) * _ROWS * layers.exchanged * layers.compute
        self.of_slice = shape.attention_layers / shape.layers * exchanged / kept
        # In thousandths: of each stage, and in a slice also of each block.
        of_stages = job.stage_blocks + layers.ends() / kept + self.of_head * job.head_shares
        self.stages: list[int] = np.rint(THOUSANDTHS * of_stages).astype(int).tolist()
        self.slice = round(THOUSANDTHS * self.of_slice)
        # Tokens of a document of a context window on a pipeline rank, counted once per block.
        self.window = job.context_window * max(int(job.stage_blocks[mine].sum()) for mine in job.layout.rank_stages)
        self._slices = job.slices_documents

    def in_slices(self, in_flight: float) -> float:
        """Tokens in slices among those ``in_flight``, counted per block: a third, or one document if that is more."""
        return max(self.window, _SLICED * in_flight) if self._slices else 0.0


def product_bytes(job: Job) -> int:
    """Copies of input and gradient of the widest linear layer, to compute the gradient of its weights for many rows."""
    layers, shape = LayerMemory(job, PRODUCT_ROWS), job.shape
    wide = max(shape.ffn_hidden, shape.vocab_size * (not job.layout.deals_head)) // job.layout.tp
    return layers.later * (layers.gathered + PRODUCT_ROWS * wide * layers.compute)


def master_bytes(job: Job) -> int:
    """Bytes of a weight, a moment, or an accumulated gradient: float32 or wider."""
    return max(job.hardware.bytes_per_value, MASTER_BYTES)


def _largest_exchange(job: Job, rows: int) -> Exchange:
    """At most an even share of tokens is kept, and all tokens of the other ranks moved, as for a single document."""
    if job.layout.pool_size == 1:
        return Exchange(0, 0)
    moved = (job.layout.pool_size - 1) * rows
    if job.levels_steps:  # a micro-batch of more ranks than share experts has a single document
        moved = min(moved, max(job.context_window, (job.layout.ep_ranks - 1) * rows))
    return Exchange(rows, moved)
