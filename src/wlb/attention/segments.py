"""Attention over a micro-batch that one rank holds whole."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from wlb.attention.backends import check_inputs, pick_backend
from wlb.attention.packed_attention import AttendPacked
from wlb.attention.runs import Runs
from wlb.attention.shard_layout import ShardLayout


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    backend: str = "auto",
    window: int | None = None,
) -> Tensor:
    """Causal softmax attention inside each segment of a packed micro-batch, scaled by 1/sqrt(head_dim).

    Args:
        query: (tokens, heads, head_dim).
        key: (tokens, kv_heads, head_dim); ``heads`` is a multiple of ``kv_heads``, and query head h reads
            key/value head ``h // (heads // kv_heads)`` (grouped-query attention).
        value: Same shape as ``key``.
        segment_lengths: Tokens of each segment, in packed order; they add up to ``tokens``.
        backend: A name in ``BACKENDS``, or ``auto`` for the fastest that supports the query.
        window: Tokens that each token attends up to its own; all of them without it.

    Returns:
        (tokens, heads, head_dim), of the query's type.

    Raises:
        UserError: No such back end, or it does not support a tensor of this device or type.
        ValueError: Shapes or lengths do not fit together.
    """
    check_inputs(query, key, value, window)
    if sum(segment_lengths) != len(query) or min(segment_lengths, default=0) < 1:
        raise ValueError(
            f"segment_lengths must be positive and add up to the {len(query)} tokens of the query, "
            f"got {len(segment_lengths)} segments with {sum(segment_lengths)} tokens"
        )
    layout = ShardLayout(Runs.of_segments(tuple(segment_lengths), window))
    out: Tensor = AttendPacked.apply(query, key, value, layout, pick_backend(query, backend), None, None, None)
    return out
