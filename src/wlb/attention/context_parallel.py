"""Attention over a micro-batch that is shared by the ranks of a context-parallel group.

Each rank holds query, key and value of its own tokens. Forward, the keys and values that others need set out; while
they travel, the rank attends its own tokens, segment by segment; then its pieces attend what arrived, and both
results are merged by their log-sum-exp, exactly. Backward, what was received comes first, and its gradients travel home
while the own part runs: so ranks wait for each other once in a layer, either way, and something hides it.

Received keys and values are kept for this where no rank receives more than its even share of the micro-batch
(``ShardPlan.keeps_received``). Where one does, they are sent again in the backward, and their gradients go home last.
Either way what a layer holds between forward and backward does not grow with the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from wlb.attention.backends import AttentionBackend, check_shapes, pick_backend
from wlb.attention.exchange import add_returned, add_rows, return_gradients, send_keys
from wlb.attention.profiler_regions import region
from wlb.attention.saved_attention import AttentionResults, KeptAttention
from wlb.attention.shard_layout import ShardLayout, shard_layout
from wlb.sharding.plan import ShardPlan

_OWN, _RECEIVED = "attention own", "attention received"  # the two parts, in a profiler's trace


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shard_plan: ShardPlan,
    group: dist.ProcessGroup | None,
    backend: str = "auto",
    kept: KeptAttention | None = None,
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
    check_shapes(query, key, value)
    expected = int(shard_plan.tokens_per_rank[rank])
    if len(query) != expected:
        raise ValueError(f"rank {rank} holds {expected} tokens under the plan, the query has {len(query)}")
    layout = shard_layout(shard_plan, rank, query.device)
    out: Tensor = _ContextParallelAttention.apply(
        query, key, value, layout, group, pick_backend(query, backend), kept or KeptAttention()
    )
    return out


class _ContextParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: ShardLayout,
        group: dist.ProcessGroup | None,
        backend: AttentionBackend,
        kept: KeptAttention,
    ) -> Tensor:
        out, log_sum_exp, received = kept.get(lambda: _attend(query, key, value, layout, group, backend))
        ctx.save_for_backward(query, key, value, out, log_sum_exp, received)
        ctx.layout, ctx.group, ctx.backend = layout, group, backend
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        layout, group = ctx.layout, ctx.group
        backend: AttentionBackend = ctx.backend
        query, key, value, out, log_sum_exp, received = ctx.saved_tensors

        def own_part() -> tuple[Tensor, Tensor, Tensor]:
            if layout.own_runs is None:
                return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
            with region(_OWN):
                return backend.backward(grad_out, query, key, value, out, log_sum_exp, layout.own_runs)

        def received_part(received: Tensor) -> tuple[Tensor | None, Tensor]:
            with region(_RECEIVED):
                return _received_gradients(grad_out, query, received, out, log_sum_exp, layout, backend)

        if not layout.exchanges:
            return *own_part(), None, None, None, None
        if received is not None:
            grad_rows, grad_received = received_part(received)
            homeward = return_gradients(grad_received, layout, group)
            grad_query, grad_key, grad_value = own_part()
        else:
            arrival = send_keys(key, value, layout, group)
            grad_query, grad_key, grad_value = own_part()
            grad_rows, grad_received = received_part(arrival.wait())
            homeward = return_gradients(grad_received, layout, group)
        if grad_rows is not None:
            add_rows(grad_query, layout.query_rows, grad_rows)
        returned = homeward.wait()
        grad_key = add_returned(grad_key, returned[:, 0], layout)
        grad_value = add_returned(grad_value, returned[:, 1], layout)
        return grad_query, grad_key, grad_value, None, None, None, None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: ShardLayout,
    group: dist.ProcessGroup | None,
    backend: AttentionBackend,
) -> AttentionResults:
    """Attention of this rank's tokens, and the keys and values it received if they are kept."""
    arrival = send_keys(key, value, layout, group) if layout.exchanges else None
    if layout.own_runs is None:
        out, log_sum_exp = query.clone(), query.new_empty(query.shape[1], 0)
    else:
        with region(_OWN):
            out, log_sum_exp = backend.forward(query, key, value, layout.own_runs)
    if arrival is None:
        return AttentionResults(out, log_sum_exp, None)
    received = arrival.wait()
    with region(_RECEIVED):
        _attend_received(query, received, out, log_sum_exp, layout, backend)
    return AttentionResults(out, log_sum_exp, received if layout.keeps_received else None)


def _attend_received(
    query: Tensor, received: Tensor, out: Tensor, log_sum_exp: Tensor, layout: ShardLayout, backend: AttentionBackend
) -> None:
    """Fold attention over the received keys into ``out`` and ``log_sum_exp``, in place."""
    if layout.remote_runs is None:
        return
    rows = layout.query_rows
    key, value = received.index_select(0, layout.key_rows).unbind(1)
    part, part_log_sum_exp = backend.forward(query.index_select(0, rows), key, value, layout.remote_runs)
    # Softmax over both sets of keys weights each set's output with its share of the summed exponentials.
    before = log_sum_exp.index_select(1, rows)
    share = torch.sigmoid(part_log_sum_exp - before).T[..., None]  # of the received keys; (rows, heads, 1)
    merged = out.index_select(0, rows).to(share.dtype).lerp_(part.to(share.dtype), share)
    out.index_copy_(0, rows, merged.to(out.dtype))
    log_sum_exp.index_copy_(1, rows, torch.logaddexp(before, part_log_sum_exp))


def _received_gradients(
    grad_out: Tensor,
    query: Tensor,
    received: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    layout: ShardLayout,
    backend: AttentionBackend,
) -> tuple[Tensor | None, Tensor]:
    """Gradients of ``layout.query_rows`` (None where there are none), and of the received keys and values."""
    grad_received = torch.zeros_like(received)
    if layout.remote_runs is None:
        return None, grad_received
    rows = layout.query_rows
    key, value = received.index_select(0, layout.key_rows).unbind(1)
    grad_rows, grad_key, grad_value = backend.backward(
        grad_out.index_select(0, rows),
        query.index_select(0, rows),
        key,
        value,
        out.index_select(0, rows),
        log_sum_exp.index_select(1, rows),
        layout.remote_runs,
    )
    for side, grad in enumerate((grad_key, grad_value)):
        if len(layout.key_rows) == len(received):  # each is attended by one piece only
            grad_received[:, side].index_copy_(0, layout.key_rows, grad)
        else:
            grad_received[:, side].index_add_(0, layout.key_rows, grad)
    return grad_rows, grad_received
