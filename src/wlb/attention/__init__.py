"""Exact causal attention over packed documents, on the best back end for the device.

A model calls one of two functions. ``segment_attention`` takes the query, key and value of a whole micro-batch and the
lengths of its segments. ``context_parallel_attention`` takes one rank's rows of them and the ``ShardPlan``. No token
attends outside its segment. Both describe their work as a ``VariableLengthBatch``, which a back end computes:

- ``reference``: dense masked scores, for any device and type; slow, and the oracle for the other two;
- ``cpu``: PyTorch's flash attention for CPU, sequence by sequence, in time proportional to the attended area;
- ``cuda``: PyTorch's variable-length flash attention, one kernel for all sequences.

Read ``backends/``, then ``shard_layout.py`` (what a rank sends, receives and attends), ``exchange.py`` (its messages),
``packed_attention.py`` (forward and backward) and ``slices.py`` (documents that a pipeline runs in parts). A new back
end is a module with ``forward``, ``backward`` and ``unsupported``, and a name in ``BACKENDS``; ``tests/attention``
compares it with ``reference``. Nothing here knows models, plans of steps or jobs.

Names of tensors end in their shape: T tokens that a rank holds · A tokens that arrive there · S tokens that it sends ·
Q queries and K keys of one call of a back end · H query heads · G key/value heads · E head_dim. x_A2GE holds keys and
values side by side.
"""

from collections.abc import Sequence

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wlb.attention.backends import check_inputs, pick_backend
from wlb.attention.exchange import KVReexchanges, PlanRanks
from wlb.attention.packed_attention import AttendPacked, AttentionCache
from wlb.attention.shard_layout import ShardLayout, shard_layout
from wlb.attention.slices import SliceInLayer
from wlb.attention.variable_length import VariableLengthBatch
from wlb.errors import UserError
from wlb.sharding.plan import ShardPlan

__all__ = ["context_parallel_attention", "segment_attention"]


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
        value: (tokens, kv_heads, value_dim); latent attention has values narrower than keys.
        segment_lengths: Tokens of each segment, in packed order; they add up to ``tokens``.
        backend: A name in ``BACKENDS``, or ``auto`` for the fastest one that supports the query.
        window: Each token attends this many tokens, up to and including itself; None is no limit.

    Returns:
        (tokens, heads, value_dim), in the type of the query.

    Raises:
        UserError: The back end does not exist, or does not support this device or type.
        ValueError: Shapes or lengths do not fit together.
    """
    check_inputs(query, key, value, window)
    if sum(segment_lengths) != len(query) or min(segment_lengths, default=0) < 1:
        raise ValueError(
            f"segment_lengths must be positive and add up to the {len(query)} tokens of the query, "
            f"got {len(segment_lengths)} segments with {sum(segment_lengths)} tokens"
        )
    layout = ShardLayout(VariableLengthBatch.of_segments(tuple(segment_lengths), _needed(window, segment_lengths)))
    tensors = _of_one_width(query, key, value)
    out: Tensor = AttendPacked.apply(*tensors, layout, pick_backend(query, backend), PlanRanks(None), None, None, None)
    return out[..., : value.shape[-1]]


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shard_plan: ShardPlan,
    group: dist.ProcessGroup | None,
    backend: str = "auto",
    cache: AttentionCache | None = None,
    reexchanges: KVReexchanges | None = None,
    window: int | None = None,
    members: Sequence[int] | None = None,
    sliced: SliceInLayer | None = None,
) -> Tensor:
    """Causal softmax attention inside each segment of a micro-batch, over a group of ranks that share it.

    Every rank of the plan calls this with the same plan and its own tokens: the ones at
    ``shard_plan.positions(rank)`` of the packed micro-batch, in that order. A rank may hold no tokens. Outputs and
    gradients equal those of ``segment_attention`` over the whole micro-batch, which explains ``query``, ``key``,
    ``value``, ``backend`` and ``window``.

    Args:
        shard_plan: Which rank holds which tokens.
        group: The context-parallel ranks, in the order of the plan; None is the default group. A plan for one rank
            needs no process group.
        cache: For activation checkpointing: a second call with the same object and the same tensors computes and
            exchanges nothing.
        reexchanges: Pass the same object to all layers of a stage that run this micro-batch, so that the backward
            exchanges keys and values again in time. Ignored where ``cache`` is given.
        members: The ranks of ``group`` that the plan is for, in its order; all of them by default. The others need not
            call this. With NCCL every rank must have taken part in an earlier call of ``group``.
        sliced: For a plan whose first segment is a slice: the earlier slices in this layer, from
            ``KeptSlices.layers``.

    Returns:
        (local tokens, heads, value_dim), in the type of the query.

    Raises:
        UserError: As ``segment_attention``; or the first segment is a slice and nothing keeps the slices before it.
        ValueError: Tensors, plan and group do not fit together, or slices do not run forward in order and backward in
            reverse order.
    """
    if shard_plan.earlier is not None and sliced is None:
        raise UserError(
            f"the micro-batch begins with a slice of a document, and only a pipeline keeps the {shard_plan.earlier} "
            "tokens before it; run it with wlb.runtime.stage.run_order, or plan whole documents"
        )
    alone = group is None and shard_plan.cp_size == 1
    in_group, rank = (1, 0) if alone else (dist.get_world_size(group), dist.get_rank(group))
    if members is not None and not alone:
        in_group, rank = len(members), members.index(rank)
    if in_group != shard_plan.cp_size:
        raise ValueError(
            f"the plan is for {shard_plan.cp_size} ranks and the group has {in_group}; give the context-parallel group"
        )
    check_inputs(query, key, value, window)
    expected = int(shard_plan.tokens_per_rank[rank])
    if len(query) != expected:
        held = f"the plan gives rank {rank} {expected} tokens and the query has {len(query)}"
        raise ValueError(f"{held}; give the tokens at shard_plan.positions({rank})")
    lengths = shard_plan.segment_lengths
    reach = _needed(window, (*lengths, lengths[0] + (shard_plan.earlier or 0)))
    layout = shard_layout(shard_plan, rank, query.device, reach)
    ranks, tensors = PlanRanks(group, members), _of_one_width(query, key, value)
    out: Tensor = AttendPacked.apply(*tensors, layout, pick_backend(query, backend), ranks, cache, reexchanges, sliced)
    return out[..., : value.shape[-1]]


def _needed(window: int | None, segment_lengths: Sequence[int]) -> int | None:
    """None where every segment fits into the window: full attention overlaps its exchange with compute."""
    return None if window is None or window >= max(segment_lengths, default=0) else window


def _of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad keys or values with columns of zeros, which change nothing, where the two differ in width."""
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if head_dim < value_dim:
        query = F.pad(query * (value_dim / head_dim) ** 0.5, (0, value_dim - head_dim))  # attention scales by the width
        key = F.pad(key, (0, value_dim - head_dim))
    return query, key, F.pad(value, (0, head_dim - value_dim)) if value_dim < head_dim else value
