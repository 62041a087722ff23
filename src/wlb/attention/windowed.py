"""Sliding-window attention over a micro-batch sharded by a context-parallel group.

Ranks send the ends of pieces that other ranks' windows reach, at most ``window - 1`` tokens of each, and attend when
these have arrived: there is little to hide. What was received is kept until the backward for the same reason.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from wlb.attention.backends import AttentionBackend
from wlb.attention.exchange import add_returned, return_gradients, send_keys
from wlb.attention.profiler_regions import region
from wlb.attention.saved_attention import AttentionResults, KeptAttention
from wlb.attention.window_layout import WindowLayout

_REGION = "attention window"


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: WindowLayout,
    group: dist.ProcessGroup | None,
    backend: AttentionBackend,
    kept: KeptAttention | None,
) -> Tensor:
    """As ``context_parallel_attention``, which calls it, with what that has made of its plan."""
    out: Tensor = _WindowedAttention.apply(query, key, value, layout, group, backend, kept)
    return out


class _WindowedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: WindowLayout,
        group: dist.ProcessGroup | None,
        backend: AttentionBackend,
        kept: KeptAttention | None,
    ) -> Tensor:
        results = (kept or KeptAttention()).get(lambda: _attend(query, key, value, layout, group, backend))
        ctx.save_for_backward(query, key, value, results.out, results.log_sum_exp, *results.received)
        ctx.layout, ctx.group, ctx.backend = layout, group, backend
        return results.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        layout: WindowLayout = ctx.layout
        backend: AttentionBackend = ctx.backend
        query, key, value, out, log_sum_exp, *received = ctx.saved_tensors
        keys, values = (_held(tensor, received, side) for side, tensor in enumerate((key, value)))
        # Summed over the pieces that see a key, and over ranks; a narrow type would round each time.
        wide = torch.promote_types(key.dtype, torch.float32)
        totals = [torch.zeros_like(held, dtype=wide) for held in (keys, values)]
        grad_query = torch.zeros_like(query)
        if layout.runs is not None:
            rows = layout.key_rows
            with region(_REGION):
                grad_query, *grads = backend.backward(
                    grad_out, query, keys[rows], values[rows], out, log_sum_exp, layout.runs
                )
            for total, grad in zip(totals, grads, strict=True):
                total.index_add_(0, rows, grad.to(wide))
        grad_key, grad_value = (total[: len(key)] for total in totals)
        if layout.message is not None:
            of_received = torch.stack([total[len(key) :] for total in totals], dim=1).to(key.dtype)
            returned = return_gradients(of_received, layout.message, ctx.group).wait()
            grad_key = add_returned(grad_key, [returned[:, 0]], [layout.message])
            grad_value = add_returned(grad_value, [returned[:, 1]], [layout.message])
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None, None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: WindowLayout,
    group: dist.ProcessGroup | None,
    backend: AttentionBackend,
) -> AttentionResults:
    """Attention of this rank's tokens, and the keys and values it received."""
    received = () if layout.message is None else (send_keys(key, value, layout.message, group).wait(),)
    if layout.runs is None:
        return AttentionResults(query.clone(), query.new_empty(query.shape[1], 0), received)
    keys, values = (_held(tensor, received, side)[layout.key_rows] for side, tensor in enumerate((key, value)))
    with region(_REGION):
        out, log_sum_exp = backend.forward(query, keys, values, layout.runs)
    return AttentionResults(out, log_sum_exp, received)


def _held(own: Tensor, received: tuple[Tensor, ...] | list[Tensor], side: int) -> Tensor:
    """This rank's keys (``side`` 0) or values (1), followed by those received."""
    return torch.cat([own, *(tensor[:, side] for tensor in received)])
