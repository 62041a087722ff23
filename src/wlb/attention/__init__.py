"""Exact causal attention over packed documents, on the best back end for the device.

A model calls one of two functions. ``segment_attention`` takes query, key and value of a whole micro-batch and the
lengths of its segments; ``context_parallel_attention`` takes one rank's share of them and the ``ShardPlan``. No token
attends outside its segment. Both cut their work into ``Runs`` of queries against runs of keys, and a back end computes
those:

- ``reference``: dense masked scores, any device and type; slow, and the oracle that the others are checked
  against;
- ``cpu``: PyTorch's flash attention for CPU, run by run, in time proportional to the attended area;
- ``cuda``: PyTorch's variable-length flash attention, one kernel for all runs.

Names of tensors end in their shape: T tokens that a rank holds · A tokens that arrive there · S tokens that it sends ·
Q queries and K keys of one call of a back end · H query heads · G key/value heads · E head_dim. x_A2GE holds keys and
values side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wlb.attention.backends import check_inputs, pick_backend
from wlb.attention.exchange import PlanRanks, Resends
from wlb.attention.packed_attention import AttendPacked, KeptAttention
from wlb.attention.runs import Runs
from wlb.attention.shard_layout import ShardLayout, shard_layout
from wlb.attention.slices import SliceInLayer
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
        backend: A name in ``BACKENDS``, or ``auto`` for the fastest that supports the query.
        window: Tokens that each token attends up to its own; all of them without it.

    Returns:
        (tokens, heads, value_dim), of the query's type.

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
    layout = ShardLayout(Runs.of_segments(tuple(segment_lengths), _needed(window, segment_lengths)))
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
    kept: KeptAttention | None = None,
    resends: Resends | None = None,
    window: int | None = None,
    members: Sequence[int] | None = None,
    sliced: SliceInLayer | None = None,
) -> Tensor:
    """Causal softmax attention inside each segment of a micro-batch, over a group of ranks that share it.

    Every rank of the plan calls this with the same plan and its own tokens, which are those at
    ``shard_plan.positions(rank)`` of the packed micro-batch, in that order; a rank may hold none. Outputs and gradients
    are those of ``segment_attention`` over the whole micro-batch.

    Args:
        query: (local tokens, heads, head_dim).
        key: (local tokens, kv_heads, head_dim); heads are grouped as in ``segment_attention``.
        value: (local tokens, kv_heads, value_dim).
        shard_plan: Who holds which tokens.
        group: The context-parallel ranks, in the order of the plan; None is the default group. A plan for one rank
            needs no process group.
        backend: A name in ``BACKENDS``, or ``auto`` for the fastest that supports the query.
        kept: For activation checkpointing: a second call with the same object and the same tensors computes and
            exchanges nothing.
        resends: The same object in all layers of a stage that run this micro-batch, so that keys and values that have
            to be sent again are there in time. Not looked at with ``kept``.
        window: Tokens that each token attends up to its own, of its segment; all of them without it.
        members: The ranks of ``group`` that the plan is for, in its order; all of them by default. The others need not
            call this. With NCCL all must have been in a call of ``group`` before.
        sliced: For a plan whose first segment is a slice: the slices before it in this layer, from
            ``KeptSlices.layers``.

    Returns:
        (local tokens, heads, value_dim), of the query's type.

    Raises:
        UserError: No such back end, or it does not support a tensor of this device or type; or the first segment is a
            slice, and nothing keeps slices.
        ValueError: Tensors, plan and group do not fit together, or slices do not go forward in order and backward in
            reverse.
    """
    if shard_plan.earlier is not None and sliced is None:
        raise UserError(
            f"a micro-batch begins with a slice that has {shard_plan.earlier} tokens before it, which only a pipeline "
            "keeps; run it with wlb.runtime.stage.run_order, or plan whole documents"
        )
    alone = group is None and shard_plan.cp_size == 1
    in_group, rank = (1, 0) if alone else (dist.get_world_size(group), dist.get_rank(group))
    if members is not None and not alone:
        in_group, rank = len(members), members.index(rank)
    if in_group != shard_plan.cp_size:
        raise ValueError(
            f"the plan is for {shard_plan.cp_size} ranks, the group has {in_group}; give the context-parallel group"
        )
    check_inputs(query, key, value, window)
    expected = int(shard_plan.tokens_per_rank[rank])
    if len(query) != expected:
        raise ValueError(f"rank {rank} holds {expected} tokens under the plan, the query has {len(query)}")
    lengths = shard_plan.segment_lengths
    reach = _needed(window, (*lengths, lengths[0] + (shard_plan.earlier or 0)))
    layout = shard_layout(shard_plan, rank, query.device, reach)
    ranks, tensors = PlanRanks(group, members), _of_one_width(query, key, value)
    out: Tensor = AttendPacked.apply(*tensors, layout, pick_backend(query, backend), ranks, kept, resends, sliced)
    return out[..., : value.shape[-1]]


def _needed(window: int | None, segment_lengths: Sequence[int]) -> int | None:
    """None for a window that every segment fits into: full attention hides its exchange behind computing."""
    return None if window is None or window >= max(segment_lengths, default=0) else window


def _of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With columns of zeros, which change nothing, where keys and values differ in width."""
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if head_dim < value_dim:
        query = F.pad(query * (value_dim / head_dim) ** 0.5, (0, value_dim - head_dim))  # it is scaled by its width
        key = F.pad(key, (0, value_dim - head_dim))
    return query, key, F.pad(value, (0, head_dim - value_dim)) if value_dim < head_dim else value
