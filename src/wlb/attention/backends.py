"""The registry of attention back ends, and the function that picks one.

A back end is a module with two functions: ``unsupported(query)`` says why it cannot run on a tensor like
this one (``None`` if it can), and ``attend(query, key, value, segment_lengths)`` computes the attention,
differentiably.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from wlb.attention import cpu, cuda, reference
from wlb.errors import UserError


class AttentionBackend(Protocol):
    """What a module must offer to be registered."""

    def unsupported(self, query: Tensor) -> str | None: ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, segment_lengths: tuple[int, ...]) -> Tensor: ...


# In order of preference: "auto" takes the first that supports the query.
BACKENDS: dict[str, AttentionBackend] = {
    "cuda": cuda,
    "cpu": cpu,
    "reference": reference,
}


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, segment_lengths: Sequence[int], backend: str = "auto"
) -> Tensor:
    """Causal softmax attention inside each segment of a packed micro-batch, scaled by 1/sqrt(head_dim).

    Args:
        query: (tokens, heads, head_dim).
        key: (tokens, kv_heads, head_dim); ``heads`` is a multiple of ``kv_heads``, and query head h reads
            key/value head ``h // (heads // kv_heads)`` (grouped-query attention).
        value: Same shape as ``key``.
        segment_lengths: Tokens of each segment, in packed order; they add up to ``tokens``.
        backend: A name in ``BACKENDS``, or ``auto`` for the fastest that supports the query.

    Returns:
        (tokens, heads, head_dim), of the query's type.

    Raises:
        UserError: No such back end, or it does not support a tensor of this device or type.
        ValueError: Shapes or lengths do not fit together.
    """
    _check_shapes(query, key, value, segment_lengths)
    return pick_backend(query, backend).attend(query, key, value, tuple(segment_lengths))


def pick_backend(query: Tensor, backend: str = "auto") -> AttentionBackend:
    """The back end that ``segment_attention`` would use for this query; raises ``UserError`` as it does."""
    if backend == "auto":
        return next(candidate for candidate in BACKENDS.values() if candidate.unsupported(query) is None)
    if backend not in BACKENDS:
        raise UserError(f"attention back end {backend!r} does not exist; choose auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[backend].unsupported(query)
    if reason is not None:
        raise UserError(f"attention back end {backend!r} cannot be used: {reason}; choose auto")
    return BACKENDS[backend]


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, segment_lengths: Sequence[int]) -> None:
    tokens, heads, head_dim = query.shape
    if key.shape != value.shape or key.shape[0] != tokens or key.shape[2] != head_dim or heads % key.shape[1]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not fit together"
        )
    if sum(segment_lengths) != tokens or min(segment_lengths, default=0) < 1:
        raise ValueError(
            f"segment_lengths must be positive and add up to the {tokens} tokens of the query, "
            f"got {len(segment_lengths)} segments with {sum(segment_lengths)} tokens"
        )
