"""Shapes of the language models that the workload model prices, and which of them the trainer builds.

A model is a sequence of blocks of attention and a feed-forward layer. Blocks may differ: attention is full, has a
sliding window, is restricted to the tokens that an indexer chooses, or is replaced by a layer whose cost is linear in
tokens; the feed-forward layer may be a mixture of experts, or missing.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from wlb.errors import UserError

_MOST_LAYERS = 10_000  # ten times the deepest transformer trained so far (DeepNet, arXiv 2203.00555)


class BlockKind(NamedTuple):
    """The kind of a block; ``routed`` says that its feed-forward layer is a mixture of experts.

    A ``linear`` layer stands in place of attention, or beside it (Falcon-H1).
    """

    attention: Literal["full", "sliding", "indexed", "none"]
    routed: bool
    linear: bool = False
    feeds_forward: bool = True

    @property
    def attends(self) -> bool:
        return self.attention != "none"


DENSE = BlockKind("full", False)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer (Mixtral, arXiv 2401.04088, section 2.1).

    A router sends every token to ``active`` of ``count`` SwiGLU experts of width ``ffn_hidden``. Every token also
    passes through shared experts, ``shared_hidden`` columns in total (DeepSeekMoE, arXiv 2401.06066). The first
    ``dense_layers`` blocks keep their feed-forward layer. ``biased`` experts have biases, which are not counted.
    Routed experts may work on a projection of the token to ``latent`` values (Nemotron 3 Super, arXiv 2512.20856).
    """

    count: int
    active: int
    ffn_hidden: int
    shared_hidden: int = 0
    dense_layers: int = 0
    biased: bool = False
    latent: int | None = None


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values come from a latent (DeepSeek-V2, arXiv 2405.04434).

    The latent of a token has ``kv_rank`` values, plus ``rope_dim`` values with rotary positions, which all heads share
    as part of their key. A head has queries and keys of ``head_dim`` values, including ``rope_dim``, and values of
    ``value_dim``. Queries have a latent of ``q_rank`` values; 0 means none.
    """

    q_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Indexer:
    """Sparse attention of DeepSeek-V3.2 (arXiv 2512.02556, section 2.1): each token attends the ``top_k`` best tokens.

    A lightning indexer scores all earlier tokens, with ``heads`` queries and one key of ``head_dim`` values. ``layers``
    blocks have one; the others reuse the choice of the block before (GLM-5.2).
    """

    top_k: int
    heads: int
    head_dim: int
    layers: int


@dataclass(frozen=True)
class LinearLayer:
    """A layer with a state of fixed size: Mamba-2 (arXiv 2405.21060), gated DeltaNet (2412.06464) or KDA (2510.26692).

    Every one of ``heads`` has a state of ``key_dim`` x ``value_dim`` values; ``key_heads`` heads of keys and queries
    (the groups of B and C in Mamba-2, whose ``key_dim`` is its state size) are shared evenly by them. ``keys`` and
    ``values`` are the widths of all heads.
    """

    kind: Literal["mamba2", "gated_delta", "kda"]
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.heads * self.value_dim


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and a SwiGLU feed-forward layer, or a variant of it.

    ``layers`` counts all blocks of the model, ``head_dim`` is the width of one attention head's query and key.
    ``gated_attention`` multiplies the output by a gate as wide as the queries (Qwen3-Next). A feed-forward layer of two
    ``ffn_matrices`` has no gate (Nemotron).

    With ``sliding_window`` w, a token attends the last w tokens including itself, in all blocks except the first
    ``full_attention_layers`` and every ``full_attention_every``-th block, if given. ``experts`` replace the
    feed-forward layer; ``ffn_hidden`` is then the width of dense blocks.

    ``pattern`` lists the blocks of a hybrid as Nemotron-H does (arXiv 2504.03624): full attention ``*``, a ``linear``
    layer ``M``, or both side by side ``H``; then experts ``E``, a dense feed-forward layer ``-``, or nothing.

    Raises ``UserError`` for a size below 1, more than 10,000 layers, an odd ``head_dim``, query heads that do not share
    the key/value heads evenly, and variants that cannot be combined.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab_size: int
    sliding_window: int | None = None
    full_attention_layers: int | None = None
    full_attention_every: int | None = None
    experts: Experts | None = None
    latent: LatentAttention | None = None
    pattern: str | None = None
    linear: LinearLayer | None = None
    indexer: Indexer | None = None
    gated_attention: bool = False
    ffn_matrices: Literal[2, 3] = 3

    def __post_init__(self) -> None:
        parts = {"experts.": self.experts, "latent.": self.latent, "linear.": self.linear, "indexer.": self.indexer}
        for prefix, part in [*parts.items(), ("", self)]:
            for name, value in vars(part).items() if part is not None else ():
                least = 0 if name in ("shared_hidden", "dense_layers", "q_rank") else 1
                if type(value) is int and value < least:
                    raise UserError(f"model shape has {prefix}{name} = {value}; it must be at least {least}")
        if self.layers > _MOST_LAYERS:
            raise UserError(f"model shape has layers = {self.layers}; it must be at most {_MOST_LAYERS}")
        if self.head_dim % 2:
            raise UserError(
                f"model shape has head_dim = {self.head_dim}, which is odd; rotary positions turn pairs of dimensions, "
                "choose an even one"
            )
        if self.heads % self.kv_heads:
            raise UserError(
                f"model shape has heads = {self.heads}, not a multiple of kv_heads = {self.kv_heads}; "
                "every key/value head serves the same number of query heads"
            )
        if self.latent is not None and (self.kv_heads != self.heads or self.latent.rope_dim > self.head_dim):
            raise UserError(
                f"model shape has latent attention with kv_heads = {self.kv_heads} for heads = {self.heads} and "
                f"rope_dim = {self.latent.rope_dim} for head_dim = {self.head_dim}; give every head a key/value head, "
                "and a head_dim of at least rope_dim"
            )
        if (experts := self.experts) is not None:
            if experts.active > experts.count:
                raise UserError(
                    f"model shape has experts.active = {experts.active} of {experts.count} experts; lower it"
                )
            if experts.dense_layers >= self.layers:
                raise UserError(
                    f"model shape has experts.dense_layers = {experts.dense_layers} of {self.layers} layers, which "
                    "leaves none with experts; lower it"
                )
        for name in ("full_attention_layers", "full_attention_every"):
            if getattr(self, name) is not None and self.sliding_window is None:
                raise UserError(
                    f"model shape has {name} = {getattr(self, name)} but no sliding_window for the other blocks; "
                    "give sliding_window too"
                )
        if self.indexer is not None and (self.latent is None or self.indexer.layers > self.layers):
            raise UserError(f"model shape has {self.indexer} without latent attention, or over {self.layers} layers")
        if self.pattern is not None:
            self._check_pattern(self.pattern)

    def _check_pattern(self, pattern: str) -> None:
        if not re.fullmatch(f"({_BLOCK})+", pattern) or len(_kinds(pattern)) != self.layers:
            written = f"pattern = {pattern!r} for {self.layers} layers"
            raise UserError(f"model shape has {written}; each is M, * or H, then E, - or nothing")
        if self.sliding_window is not None or self.indexer is not None:
            raise UserError(
                "model shape has a pattern of blocks with full attention; leave sliding_window, indexer out"
            )
        for letters, name in (("MH", "linear"), ("E", "experts")):
            if any(letter in pattern for letter in letters) != (getattr(self, name) is not None):
                raise UserError(f"model shape has pattern = {pattern!r}; give {name} with {' or '.join(letters)} alone")

    def block_kind(self, layer: int) -> BlockKind:
        """The kind of block ``layer``, counted from 0."""
        if self.pattern is not None:
            return _kinds(self.pattern)[layer]
        every = self.full_attention_every
        routed = self.experts is not None and layer >= self.experts.dense_layers
        if layer < (self.full_attention_layers or 0) or (every is not None and (layer + 1) % every == 0):
            return BlockKind("full", routed)
        return BlockKind("indexed" if self.indexer else "sliding" if self.sliding_window else "full", routed)

    @property
    def blocks(self) -> Mapping[BlockKind, int]:
        """Number of blocks of each kind."""
        return _count_blocks(self)

    def layers_of(self, *attention: str) -> int:
        """Number of blocks with one of these kinds of attention."""
        return sum(count for kind, count in self.blocks.items() if kind.attention in attention)

    @property
    def attention_layers(self) -> int:
        """Number of blocks with attention, which alone have keys and values."""
        return self.layers - self.layers_of("none")

    @property
    def window(self) -> int | None:
        """The most tokens that a token attends in blocks without full attention."""
        return self.sliding_window if self.indexer is None else self.indexer.top_k

    @property
    def expert_input(self) -> int:
        """Values of a token that go to its experts."""
        return self.experts.latent if self.experts is not None and self.experts.latent else self.hidden

    @property
    def value_dim(self) -> int:
        """Width of the value and output of an attention head."""
        return self.head_dim if self.latent is None else self.latent.value_dim


_BLOCK = "[*MH][E-]?"  # of a pattern


@lru_cache(maxsize=256)
def _kinds(pattern: str) -> list[BlockKind]:
    return [
        BlockKind("none" if block[0] == "M" else "full", block[1:] == "E", block[0] != "*", len(block) > 1)
        for block in re.findall(_BLOCK, pattern)
    ]


@lru_cache(maxsize=256)
def _count_blocks(shape: ModelShape) -> Mapping[BlockKind, int]:
    return Counter(map(shape.block_kind, range(shape.layers)))
