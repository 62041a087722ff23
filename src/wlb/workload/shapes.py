"""Shapes of the language models that the workload model prices, and which of them the trainer builds.

A model is a sequence of blocks of attention and a feed-forward layer. Blocks may differ: attention is full or has a
sliding window, and the feed-forward layer may be a mixture of experts.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from wlb.errors import UserError

_MOST_LAYERS = 10_000  # ten times the deepest transformer trained so far (DeepNet, arXiv 2203.00555)


class BlockKind(NamedTuple):
    """The kind of a block; ``routed`` says that its feed-forward layer is a mixture of experts."""

    attention: Literal["full", "sliding"]
    routed: bool


DENSE = BlockKind("full", False)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer (Mixtral, arXiv 2401.04088, section 2.1).

    A router sends every token to ``active`` of ``count`` SwiGLU experts of width ``ffn_hidden``. Every token also
    passes through shared experts, ``shared_hidden`` columns in total (DeepSeekMoE, arXiv 2401.06066). The first
    ``dense_layers`` blocks keep their feed-forward layer. ``biased`` experts have biases, which are not counted.
    """

    count: int
    active: int
    ffn_hidden: int
    shared_hidden: int = 0
    dense_layers: int = 0
    biased: bool = False

    def __post_init__(self) -> None:
        _check_sizes("experts", vars(self), may_be_zero=("shared_hidden", "dense_layers", "biased"))
        if self.active > self.count:
            raise UserError(f"model shape has experts.active = {self.active} of {self.count} experts; lower it")


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

    def __post_init__(self) -> None:
        _check_sizes("latent", vars(self), may_be_zero=("q_rank",))


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and a SwiGLU feed-forward layer, or a variant of it.

    ``layers`` counts all blocks of the model, ``head_dim`` is the width of one attention head's query and key.

    With ``sliding_window`` w, a token attends the last w tokens including itself, in all blocks except the first
    ``full_attention_layers`` and every ``full_attention_every``-th block, if given. ``experts`` replace the
    feed-forward layer; ``ffn_hidden`` is then the width of dense blocks.

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

    def __post_init__(self) -> None:
        _check_sizes("", vars(self))
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
        if self.experts is not None and self.experts.dense_layers >= self.layers:
            raise UserError(
                f"model shape has experts.dense_layers = {self.experts.dense_layers} of {self.layers} layers, which "
                "leaves none with experts; lower it"
            )
        for name in ("full_attention_layers", "full_attention_every"):
            if getattr(self, name) is not None and self.sliding_window is None:
                raise UserError(
                    f"model shape has {name} = {getattr(self, name)} but no sliding_window for the other blocks; "
                    "give sliding_window too"
                )

    def block_kind(self, layer: int) -> BlockKind:
        """The kind of block ``layer``, counted from 0."""
        every = self.full_attention_every
        routed = self.experts is not None and layer >= self.experts.dense_layers
        if layer < (self.full_attention_layers or 0) or (every is not None and (layer + 1) % every == 0):
            return BlockKind("full", routed)
        return BlockKind("full" if self.sliding_window is None else "sliding", routed)

    @property
    def blocks(self) -> Mapping[BlockKind, int]:
        """Number of blocks of each kind."""
        return _count_blocks(self)

    def layers_of(self, *attention: str) -> int:
        """Number of blocks with one of these kinds of attention."""
        return sum(count for kind, count in self.blocks.items() if kind.attention in attention)

    @property
    def value_dim(self) -> int:
        """Width of the value and output of an attention head."""
        return self.head_dim if self.latent is None else self.latent.value_dim


def _check_sizes(part: str, sizes: Mapping[str, object], may_be_zero: tuple[str, ...] = ()) -> None:
    for name, value in sizes.items():
        least = 0 if name in may_be_zero else 1
        if isinstance(value, int) and value < least:
            shown = f"{part}.{name}" if part else name
            raise UserError(f"model shape has {shown} = {value}; it must be at least {least}")


@lru_cache(maxsize=256)
def _count_blocks(shape: ModelShape) -> Mapping[BlockKind, int]:
    return Counter(map(shape.block_kind, range(shape.layers)))
