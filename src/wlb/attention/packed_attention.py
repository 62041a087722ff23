"""The differentiable function beneath ``segment_attention`` and ``context_parallel_attention``.

In the forward a rank sends the keys and values that other ranks need, in parts where there are many. While they travel,
it attends its own tokens, segment by segment. Then its pieces attend each received part while the next part travels,
and the results are merged exactly by their log-sum-exp. The backward begins with the received parts, one by one, so
that returning their gradients overlaps with the next part and with the rank's own tokens.

A rank keeps received keys and values for the backward where no rank receives more than an even share of the micro-batch
(``ShardPlan.keeps_received``), so that the memory of a layer does not grow with the group. Otherwise the backward
exchanges them again, for each layer while the layer above is computed (``KVReexchanges``).

In a layer with a sliding window a rank receives little, so it waits for everything first, and keeps it.

A slice of a document attends what earlier slices have kept while its own keys travel (``wlb.attention.slices``).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from wlb.attention.backends import AttentionBackend
from wlb.attention.exchange import (
    KVReexchange,
    KVReexchanges,
    PendingExchange,
    PlanRanks,
    add_returned,
    return_gradients,
    send_keys,
    sum_rows,
)
from wlb.attention.shard_layout import Attended, Rows, ShardLayout
from wlb.attention.slices import SliceInLayer

_OWN, _RECEIVED = "attention own", "attention received"  # labels in a profiler's trace


class AttentionResults(NamedTuple):
    """What a backward pass reads besides query, key and value; tensors without autograd history."""

    out_THE: Tensor
    log_sum_exp_HT: Tensor
    received: tuple[Tensor, ...]  # keys and values of other ranks, part by part; empty where they are exchanged again


class AttentionCache:
    """Keeps the results of one attention call, for activation checkpointing, which reruns a block before its backward.

    Rerunning attention would exchange keys and values once more, while its output and log-sum-exp are two small
    tensors. So the second call reads them here, unless attention is ``computed_again`` as well.
    """

    def __init__(self, *, computed_again: bool = False) -> None:
        self.computed_again = computed_again
        self.sliced: SliceInLayer | None = None  # the same in both calls
        self._results: AttentionResults | None = None

    def get(self, compute: Callable[[], AttentionResults]) -> AttentionResults:
        """The result of ``compute``, or its stored first result."""
        results = self._results or compute()
        if not self.computed_again:
            self._results = results
        # The output of the caller gets an autograd history, which must not be stored here.
        return results._replace(out_THE=results.out_THE.detach())


class AttendPacked(torch.autograd.Function):
    """Attention of the tokens of one rank; ``ranks`` are the ranks of ``layout``, perhaps only this one."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THE: Tensor,
        k_TGE: Tensor,
        v_TGE: Tensor,
        layout: ShardLayout,
        backend: AttentionBackend,
        ranks: PlanRanks,
        cache: AttentionCache | None,
        reexchanges: KVReexchanges | None,
        sliced: SliceInLayer | None,
    ) -> Tensor:
        keeps = layout.keeps_received or (cache is not None and cache.computed_again)
        results = (cache or AttentionCache()).get(
            lambda: _attend(q_THE, k_TGE, v_TGE, layout, backend, ranks, sliced, keeps=keeps)
        )
        ctx.save_for_backward(q_THE, k_TGE, v_TGE, results.out_THE, results.log_sum_exp_HT, *results.received)
        ctx.layout, ctx.backend, ctx.ranks = layout, backend, ranks
        ctx.reexchange, ctx.reexchanges, ctx.sliced = None, reexchanges, sliced
        # Under checkpointing nothing may be held from here.
        if reexchanges is not None and cache is None and layout.parts and not keeps and any(ctx.needs_input_grad):
            ctx.reexchange = reexchanges.add(KVReexchange(k_TGE, v_TGE, layout, ranks))
        return results.out_THE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THE: Tensor) -> tuple[Tensor | None, ...]:
        layout, backend, ranks, reexchange, sliced = ctx.layout, ctx.backend, ctx.ranks, ctx.reexchange, ctx.sliced
        q_THE, k_TGE, v_TGE, out_THE, log_sum_exp_HT, *received = ctx.saved_tensors
        merged: list[tuple[Rows, Tensor]] = []
        gradient_returns: list[PendingExchange] = []
        before = sliced.before(layout.earlier) if sliced else []
        left, *left_of_parts = _left_by_later(sliced, layout, len(k_TGE))

        def received_gradients(x_A2GE: Tensor, attended: Attended | None) -> Tensor:
            with record_function(_RECEIVED):
                if attended is None:
                    return torch.zeros_like(x_A2GE)
                results = q_THE, x_A2GE, out_THE, log_sum_exp_HT
                grad_QHE, grad_A2GE = _received_gradients(grad_THE, *results, attended, backend)
                merged.append((attended.query_rows, grad_QHE))
                return grad_A2GE

        if layout.window_rows is None:
            again = [] if received else (reexchange or KVReexchange(k_TGE, v_TGE, layout, ranks)).take()
            arrived = received or (exchange.wait() for exchange in again)
            for part, x_A2GE, left_A2GE in zip(layout.parts, arrived, left_of_parts, strict=True):
                grad_A2GE = _sum(received_gradients(x_A2GE, part.attended), left_A2GE, k_TGE.dtype)
                gradient_returns.append(return_gradients(grad_A2GE, part, ranks))
            if sliced is not None and layout.before is not None:
                sliced.leave(received_gradients(before[0], layout.before))
        if reexchange is not None:
            ctx.reexchanges.start_below(reexchange)
            ctx.reexchange = None
        keys = _own_keys(k_TGE, v_TGE, [*received, *before], layout.window_rows)
        if layout.own_batch is None:
            grad_q_THE, *grads = (torch.zeros_like(tensor) for tensor in (q_THE, *keys))
        else:
            with record_function(_OWN):
                grad_q_THE, *grads = backend.backward(grad_THE, q_THE, *keys, out_THE, log_sum_exp_HT, layout.own_batch)
        if layout.window_rows is not None:
            grads, grad_A2GE, grad_K2GE = _window_gradients(grads, layout, len(k_TGE))
            for part, left_A2GE in zip(layout.parts, left_of_parts, strict=True):
                gradient_returns.append(return_gradients(_sum(grad_A2GE, left_A2GE, k_TGE.dtype), part, ranks))
            if sliced is not None:
                sliced.leave(grad_K2GE)
        if left is not None:
            grads = [grad_TGE + left_TGE for grad_TGE, left_TGE in zip(grads, left.unbind(1), strict=True)]
        for rows, grad_QHE in merged:
            grad_q_THE[rows] += grad_QHE
        if layout.parts:
            grads = add_returned(grads, [exchange.wait() for exchange in gradient_returns], layout.parts)
        return grad_q_THE, grads[0].to(k_TGE.dtype), grads[1].to(v_TGE.dtype), *[None] * 6


def _attend(
    q_THE: Tensor,
    k_TGE: Tensor,
    v_TGE: Tensor,
    layout: ShardLayout,
    backend: AttentionBackend,
    ranks: PlanRanks,
    sliced: SliceInLayer | None,
    *,
    keeps: bool,
) -> AttentionResults:
    """Attention of the tokens of this rank, and with ``keeps`` the keys and values that it received."""
    before = sliced.before(layout.earlier) if sliced else []
    exchanges = [send_keys(k_TGE, v_TGE, part, ranks) for part in layout.parts]
    if layout.own_batch is None:
        out_THE, log_sum_exp_HT = q_THE.clone(), q_THE.new_empty(q_THE.shape[1], 0)
    else:
        arrived = [] if layout.window_rows is None else [exchange.wait() for exchange in exchanges]
        keys = _own_keys(k_TGE, v_TGE, [*arrived, *before], layout.window_rows)
        with record_function(_OWN):
            out_THE, log_sum_exp_HT = backend.forward(q_THE, *keys, layout.own_batch)
    attended = [*(layout.before for _ in before), *(part.attended for part in layout.parts)]
    if len(attended) - attended.count(None) > 1:  # in a narrow type every part would round
        out_THE = out_THE.to(torch.promote_types(out_THE.dtype, torch.float32))
    for by, exchange in zip(attended, [*(PendingExchange((), x, x) for x in before), *exchanges], strict=True):
        x_A2GE = exchange.wait()
        if by is not None:
            with record_function(_RECEIVED):
                _attend_received(q_THE, x_A2GE, out_THE, log_sum_exp_HT, by, backend)
    received = tuple([exchange.received for exchange in exchanges])
    if sliced is not None and not sliced.is_kept:
        sliced.keep(torch.stack(_own_keys(k_TGE, v_TGE, received, layout.slice_rows), dim=1))
    return AttentionResults(out_THE.to(q_THE.dtype), log_sum_exp_HT, received if keeps else ())


def _own_keys(k_TGE: Tensor, v_TGE: Tensor, others: Sequence[Tensor], rows: Rows | None) -> tuple[Tensor, Tensor]:
    """The ``rows`` of local keys and values followed by ``others``, (K, G, E); without ``rows`` the local ones."""
    if rows is None:
        return k_TGE, v_TGE
    k_KGE, v_KGE = (
        torch.cat([x_TGE, *(x_A2GE[:, side] for x_A2GE in others)])[rows] for side, x_TGE in enumerate((k_TGE, v_TGE))
    )
    return k_KGE, v_KGE


def _left_by_later(sliced: SliceInLayer | None, layout: ShardLayout, tokens: int) -> list[Tensor | None]:
    """Gradients that later slices left for local keys and values, and for each received part, (.., 2, G, E)."""
    counts = [tokens, *(sum(part.receive_counts) for part in layout.parts)]
    if sliced is None or (left_K2GE := sliced.take()) is None:
        return [None] * len(counts)
    everything = left_K2GE.new_zeros(sum(counts), *left_K2GE.shape[1:])
    everything[layout.slice_rows] = left_K2GE
    return [*everything.split(counts)]


def _sum(grad: Tensor, left: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (grad if left is None else grad + left).to(dtype)


def _window_gradients(grads: Sequence[Tensor], layout: ShardLayout, tokens: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradients of local, of received and of earlier keys and values, (.., 2, G, E), from ``grads`` (K, G, E).

    All are in float32 or wider.
    """
    assert layout.window_sums is not None
    # The sum runs over the pieces that see a key, and over ranks; in a narrow type each addition would round.
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    totals = [sum_rows(grad_KGE.to(wide), layout.window_sums) for grad_KGE in grads]
    others_K2GE = torch.stack([total[tokens:] for total in totals], dim=1)
    received = len(others_K2GE) - layout.earlier
    return [total[:tokens] for total in totals], others_K2GE[:received], others_K2GE[received:]


def _attend_received(
    q_THE: Tensor,
    x_A2GE: Tensor,
    out_THE: Tensor,
    log_sum_exp_HT: Tensor,
    attended: Attended,
    backend: AttentionBackend,
) -> None:
    """Fold attention over the received keys into ``out_THE`` and ``log_sum_exp_HT``, in place."""
    rows, log_sum_exp_TH = attended.query_rows, log_sum_exp_HT.T
    k_KGE, v_KGE = x_A2GE[attended.key_rows].unbind(1)
    result_QHE, its_log_sum_exp_HQ = backend.forward(q_THE[rows], k_KGE, v_KGE, attended.batch)
    # A softmax over both sets of keys weights the output of each set by its share of the summed exponentials.
    before_QH, its_QH = log_sum_exp_TH[rows], its_log_sum_exp_HQ.T
    share_QH1, other_QH1 = (torch.sigmoid(x)[..., None] for x in (its_QH - before_QH, before_QH - its_QH))
    result_QHE = result_QHE * share_QH1
    out_THE[rows] = result_QHE.addcmul_(out_THE[rows], other_QH1).to(out_THE.dtype)
    log_sum_exp_TH[rows] = torch.logaddexp(before_QH, its_QH)


def _received_gradients(
    grad_THE: Tensor,
    q_THE: Tensor,
    x_A2GE: Tensor,
    out_THE: Tensor,
    log_sum_exp_HT: Tensor,
    attended: Attended,
    backend: AttentionBackend,
) -> tuple[Tensor, Tensor]:
    """Gradients of the queries in ``attended``, (Q, H, E), and of the received keys and values, (A, 2, G, E)."""
    grad_QHE, q_QHE, out_QHE = (x_THE[attended.query_rows] for x_THE in (grad_THE, q_THE, out_THE))
    k_KGE, v_KGE = x_A2GE[attended.key_rows].unbind(1)
    log_sum_exp_HQ = log_sum_exp_HT.T[attended.query_rows].T
    grad_q_QHE, *grads = backend.backward(grad_QHE, q_QHE, k_KGE, v_KGE, out_QHE, log_sum_exp_HQ, attended.batch)
    return grad_q_QHE, sum_rows(torch.stack(grads, dim=1), attended.key_sums)
