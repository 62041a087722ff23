"""Attention over a micro-batch sharded by a context-parallel group.

Each rank holds query, key and value of its own tokens. Forward, the keys and values that others need set out, in parts
where they are many; while they travel, the rank attends its own tokens, segment by segment; then its pieces attend each
part that arrives while the next is under way, and the results are merged by their log-sum-exp, exactly. Backward, what
was received comes first, part by part, and returning its gradients overlaps with the next part and the own one.

Received keys and values are kept for this where no rank receives more than its even share of the micro-batch
(``ShardPlan.keeps_received``), so that what a layer holds does not grow with the group. Where one does, they are sent
again in the backward, each layer's while the layer above it is computed (``Resends``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from wlb.attention.backends import AttentionBackend, check_shapes, check_window, pick_backend
from wlb.attention.exchange import Arrival, add_returned, add_rows, return_gradients, send_keys
from wlb.attention.profiler_regions import region
from wlb.attention.saved_attention import AttentionResults, KeptAttention
from wlb.attention.shard_layout import ExchangePart, ShardLayout, shard_layout
from wlb.attention.window_layout import window_layout
from wlb.attention.windowed import windowed_attention
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
    check_shapes(query, key, value)
    expected = int(shard_plan.tokens_per_rank[rank])
    if len(query) != expected:
        raise ValueError(f"rank {rank} holds {expected} tokens under the plan, the query has {len(query)}")
    if window is not None:
        check_window(window)
        of_window = window_layout(shard_plan, rank, window, query.device)
        return windowed_attention(query, key, value, of_window, group, pick_backend(query, backend), kept)
    layout = shard_layout(shard_plan, rank, query.device)
    out: Tensor = _ContextParallelAttention.apply(
        query, key, value, layout, group, pick_backend(query, backend), kept, resends
    )
    return out


class Resends:
    """What the layers of a stage send again in the backward of a micro-batch, each while the one above is computed."""

    def __init__(self) -> None:
        self.last: Resend | None = None


class Resend:
    """Keys and values of one layer, to be sent again; ``below`` is that of the layer before it."""

    def __init__(self, key: Tensor, value: Tensor, layout: ShardLayout, group: dist.ProcessGroup | None) -> None:
        self._unsent: tuple[Tensor, Tensor] | None = (key.detach(), value.detach())
        self._layout, self._group = layout, group
        self._arrivals: list[Arrival] = []
        self.below: Resend | None = None

    def start(self) -> None:
        """Start sending, if that has not happened yet."""
        if self._unsent is not None:
            self._arrivals = _send_parts(*self._unsent, self._layout, self._group)
            self._unsent = None

    def take(self) -> list[Arrival]:
        """What was sent; held here no longer, as graphs live to the end of a step."""
        self.start()
        arrivals, self._arrivals = self._arrivals, []
        return arrivals


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
        kept: KeptAttention | None,
        resends: Resends | None,
    ) -> Tensor:
        keeps = layout.keeps_received or (kept is not None and kept.computed_again)
        results = (kept or KeptAttention()).get(lambda: _attend(query, key, value, layout, group, backend, keeps=keeps))
        ctx.save_for_backward(query, key, value, results.out, results.log_sum_exp, *results.received)
        ctx.layout, ctx.group, ctx.backend = layout, group, backend
        ctx.resend, ctx.resends = None, resends
        # What is checkpointed must not be held from here.
        if resends is not None and kept is None and layout.parts and not keeps and any(ctx.needs_input_grad):
            ctx.resend = Resend(key, value, layout, group)
            resends.last, ctx.resend.below = ctx.resend, resends.last
        return results.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        layout, group = ctx.layout, ctx.group
        backend: AttentionBackend = ctx.backend
        query, key, value, out, log_sum_exp, *received = ctx.saved_tensors
        resend: Resend | None = ctx.resend
        again = [] if received else resend.take() if resend else _send_parts(key, value, layout, group)
        grads: list[Tensor | None] = []
        homeward: list[Arrival] = []
        for index, part in enumerate(layout.parts):
            arrived = received[index] if received else again[index].wait()
            with region(_RECEIVED):
                grad_rows, grad_received = _received_gradients(
                    grad_out, query, arrived, out, log_sum_exp, part, backend
                )
            grads.append(grad_rows)
            homeward.append(return_gradients(grad_received, part, group))
        if resend is not None:
            if resend.below is not None:
                resend.below.start()
            ctx.resends.last, ctx.resend, resend.below = resend.below, None, None
        if layout.own_runs is None:
            grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        else:
            with region(_OWN):
                grad_query, grad_key, grad_value = backend.backward(
                    grad_out, query, key, value, out, log_sum_exp, layout.own_runs
                )
        for part, grad_rows in zip(layout.parts, grads, strict=True):
            if grad_rows is not None:
                add_rows(grad_query, part.query_rows, grad_rows)
        if layout.parts:
            returned = [arrival.wait() for arrival in homeward]
            grad_key = add_returned(grad_key, [of_part[:, 0] for of_part in returned], layout.parts)
            grad_value = add_returned(grad_value, [of_part[:, 1] for of_part in returned], layout.parts)
        return grad_query, grad_key, grad_value, None, None, None, None, None


def _send_parts(key: Tensor, value: Tensor, layout: ShardLayout, group: dist.ProcessGroup | None) -> list[Arrival]:
    return [send_keys(key, value, part, group) for part in layout.parts]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: ShardLayout,
    group: dist.ProcessGroup | None,
    backend: AttentionBackend,
    *,
    keeps: bool,
) -> AttentionResults:
    """Attention of this rank's tokens, and with ``keeps`` the keys and values it received."""
    arrivals = _send_parts(key, value, layout, group)
    if layout.own_runs is None:
        out, log_sum_exp = query.clone(), query.new_empty(query.shape[1], 0)
    else:
        with region(_OWN):
            out, log_sum_exp = backend.forward(query, key, value, layout.own_runs)
    for part, arrival in zip(layout.parts, arrivals, strict=True):
        received = arrival.wait()
        with region(_RECEIVED):
            _attend_received(query, received, out, log_sum_exp, part, backend)
    return AttentionResults(out, log_sum_exp, tuple([arrival.received for arrival in arrivals]) if keeps else ())


def _attend_received(
    query: Tensor, received: Tensor, out: Tensor, log_sum_exp: Tensor, part: ExchangePart, backend: AttentionBackend
) -> None:
    """Fold attention over the received keys into ``out`` and ``log_sum_exp``, in place."""
    if part.runs is None:
        return
    rows = part.query_rows
    key, value = received.index_select(0, part.key_rows).unbind(1)
    result, its_log_sum_exp = backend.forward(query.index_select(0, rows), key, value, part.runs)
    # Softmax over both sets of keys weights each set's output with its share of the summed exponentials.
    before = log_sum_exp.index_select(1, rows)
    share = torch.sigmoid(its_log_sum_exp - before).T[..., None]  # of the received keys; (rows, heads, 1)
    merged = out.index_select(0, rows).to(share.dtype).lerp_(result.to(share.dtype), share)
    out.index_copy_(0, rows, merged.to(out.dtype))
    log_sum_exp.index_copy_(1, rows, torch.logaddexp(before, its_log_sum_exp))


def _received_gradients(
    grad_out: Tensor,
    query: Tensor,
    received: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    part: ExchangePart,
    backend: AttentionBackend,
) -> tuple[Tensor | None, Tensor]:
    """Gradients of ``part.query_rows`` (None where there are none), and of the received keys and values."""
    grad_received = torch.zeros_like(received)
    if part.runs is None:
        return None, grad_received
    rows = part.query_rows
    key, value = received.index_select(0, part.key_rows).unbind(1)
    grad_rows, grad_key, grad_value = backend.backward(
        grad_out.index_select(0, rows),
        query.index_select(0, rows),
        key,
        value,
        out.index_select(0, rows),
        log_sum_exp.index_select(1, rows),
        part.runs,
    )
    for side, grad in enumerate((grad_key, grad_value)):
        if len(part.key_rows) == len(received):  # each is attended by one piece only
            grad_received[:, side].index_copy_(0, part.key_rows, grad)
        else:
            grad_received[:, side].index_add_(0, part.key_rows, grad)
    return grad_rows, grad_received
