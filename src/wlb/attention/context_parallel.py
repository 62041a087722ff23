"""Attention over a micro-batch sharded by a context-parallel group."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from wlb.attention.backends import check_inputs, pick_backend
from wlb.attention.exchange import Resends
from wlb.attention.packed_attention import AttendPacked
from wlb.attention.saved_attention import KeptAttention
from wlb.attention.shard_layout import shard_layout
from wlb.sharding.plan import ShardPlan


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
) -> Tensor:
    """Causal softmax attention inside each segment of a micro-batch, over a group of ranks that share it.

    Every rank of ``group`` calls this with the same plan and its own tokens, which are those at
    ``shard_plan.positions(rank)`` of the packed micro-batch, in that order; a rank may hold none. Outputs and gradients
    are those of ``segment_attention`` over the whole micro-batch.

    Args:
        query: (local tokens, heads, head_dim).
        key: (local tokens, kv_heads, head_dim); heads are grouped as in ``segment_attention``.
        value: Same shape as ``key``.
        shard_plan: Who holds which tokens.
        group: The context-parallel ranks, in the order of the plan; None is the default group. A plan for one rank
            needs no process group.
        backend: A name in ``BACKENDS``, or ``auto`` for the fastest that supports the query.
        kept: For activation checkpointing: a second call with the same object and the same tensors computes and
            exchanges nothing.
        resends: The same object in all layers of a stage that run this micro-batch, so that keys and values that have
            to be sent again are there in time. Not looked at with ``kept``.
        window: Tokens that each token attends up to its own, of its segment; all of them without it.

    Returns:
        (local tokens, heads, head_dim), of the query's type.

    Raises:
        UserError: No such back end, or it does not support a tensor of this device or type.
        ValueError: Tensors, plan and group do not fit together.
    """
    alone = group is None and shard_plan.cp_size == 1
    ranks, rank = (1, 0) if alone else (dist.get_world_size(group), dist.get_rank(group))
    if ranks != shard_plan.cp_size:
        raise ValueError(f"the plan is for {shard_plan.cp_size} ranks, the group has {ranks}")
    check_inputs(query, key, value, window)
    expected = int(shard_plan.tokens_per_rank[rank])
    if len(query) != expected:
        raise ValueError(f"rank {rank} holds {expected} tokens under the plan, the query has {len(query)}")
    layout = shard_layout(shard_plan, rank, query.device, window)
    out: Tensor = AttendPacked.apply(query, key, value, layout, pick_backend(query, backend), group, kept, resends)
    return out
