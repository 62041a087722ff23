"""The differentiable function beneath ``segment_attention`` and ``context_parallel_attention``.

Forward, the keys and values that other ranks need set out, in parts where they are many; while they travel, the rank
attends its own tokens, segment by segment; then its pieces attend each part that arrives while the next is under way,
and the results are merged by their log-sum-exp, exactly. Backward, what was received comes first, part by part, and
returning its gradients overlaps with the next part and the own one.

Received keys and values are kept for this where no rank receives more than its even share of the micro-batch
(``ShardPlan.keeps_received``), so that what a layer holds does not grow with the group. Where one does, they are sent
again in the backward, each layer's while the layer above it is computed (``Resends``).

In a layer with a sliding window a rank attends when everything has arrived, its own tokens and the few received ones in
one go: there is little to hide. What was received is kept for the same reason.

The keys and values of a document's slice are kept for the slices after it. A later slice attends them while its own
are on their way; in the backward it leaves their gradients, which the earlier slice adds to its own, and to those that
it returns (``wlb.attention.slices``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from wlb.attention.backends import AttentionBackend
from wlb.attention.exchange import (
    Arrival,
    PlanRanks,
    Resend,
    Resends,
    add_returned,
    return_gradients,
    send_keys,
    sum_rows,
)
from wlb.attention.shard_layout import Attended, Rows, ShardLayout
from wlb.attention.slices import SliceInLayer

_OWN, _RECEIVED = "attention own", "attention received"  # the two parts, in a profiler's trace


class AttentionResults(NamedTuple):
    """What a backward pass reads beside query, key and value; tensors without autograd history."""

    out_THE: Tensor
    log_sum_exp_HT: Tensor
    received: tuple[Tensor, ...]  # other ranks' keys and values, part by part; none where they are to be sent again


class KeptAttention:
    """The results of one call of attention, for activation checkpointing, which runs a block anew before its backward.

    Attention is most of that work at long context, and its keys and values would travel once more; its output and
    log-sum-exp are two small tensors. So the first call leaves them here, and the second takes them, unless attention
    too is ``computed_again``.
    """

    def __init__(self, *, computed_again: bool = False) -> None:
        self.computed_again = computed_again
        self.sliced: SliceInLayer | None = None  # the same in both calls
        self._results: AttentionResults | None = None

    def get(self, compute: Callable[[], AttentionResults]) -> AttentionResults:
        """What ``compute`` returns, or what it returned the first time."""
        results = self._results or compute()
        if not self.computed_again:
            self._results = results
        # The caller's output gets a history, which must not come to live in here.
        return results._replace(out_THE=results.out_THE.detach())


class AttendPacked(torch.autograd.Function):
    """Attention of one rank's tokens; ``ranks`` are those of ``layout``, which may be this one alone."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THE: Tensor,
        k_TGE: Tensor,
        v_TGE: Tensor,
        layout: ShardLayout,
        backend: AttentionBackend,
        ranks: PlanRanks,
        kept: KeptAttention | None,
        resends: Resends | None,
        sliced: SliceInLayer | None,
    ) -> Tensor:
        keeps = layout.keeps_received or (kept is not None and kept.computed_again)
        results = (kept or KeptAttention()).get(
            lambda: _attend(q_THE, k_TGE, v_TGE, layout, backend, ranks, sliced, keeps=keeps)
        )
        ctx.save_for_backward(q_THE, k_TGE, v_TGE, results.out_THE, results.log_sum_exp_HT, *results.received)
        ctx.layout, ctx.backend, ctx.ranks = layout, backend, ranks
        ctx.resend, ctx.resends, ctx.sliced = None, resends, sliced
        # What is checkpointed must not be held from here.
        if resends is not None and kept is None and layout.parts and not keeps and any(ctx.needs_input_grad):
            ctx.resend = resends.add(Resend(k_TGE, v_TGE, layout, ranks))
        return results.out_THE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THE: Tensor) -> tuple[Tensor | None, ...]:
        layout, backend, ranks, resend, sliced = ctx.layout, ctx.backend, ctx.ranks, ctx.resend, ctx.sliced
        q_THE, k_TGE, v_TGE, out_THE, log_sum_exp_HT, *received = ctx.saved_tensors
        merged: list[tuple[Rows, Tensor]] = []
        homeward: list[Arrival] = []
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
            again = [] if received else (resend or Resend(k_TGE, v_TGE, layout, ranks)).take()
            arrived = received or (arrival.wait() for arrival in again)
            for part, x_A2GE, left_A2GE in zip(layout.parts, arrived, left_of_parts, strict=True):
                grad_A2GE = _sum(received_gradients(x_A2GE, part.attended), left_A2GE, k_TGE.dtype)
                homeward.append(return_gradients(grad_A2GE, part, ranks))
            if sliced is not None and layout.before is not None:
                sliced.leave(received_gradients(before[0], layout.before))
        if resend is not None:
            ctx.resends.go_on_below(resend)
            ctx.resend = None
        keys = _own_keys(k_TGE, v_TGE, [*received, *before], layout.window_rows)
        if layout.own_runs is None:
            grad_q_THE, *grads = (torch.zeros_like(tensor) for tensor in (q_THE, *keys))
        else:
            with record_function(_OWN):
                grad_q_THE, *grads = backend.backward(grad_THE, q_THE, *keys, out_THE, log_sum_exp_HT, layout.own_runs)
        if layout.window_rows is not None:
            grads, grad_A2GE, grad_K2GE = _window_gradients(grads, layout, len(k_TGE))
            for part, left_A2GE in zip(layout.parts, left_of_parts, strict=True):
                homeward.append(return_gradients(_sum(grad_A2GE, left_A2GE, k_TGE.dtype), part, ranks))
            if sliced is not None:
                sliced.leave(grad_K2GE)
        if left is not None:
            grads = [grad_TGE + left_TGE for grad_TGE, left_TGE in zip(grads, left.unbind(1), strict=True)]
        for rows, grad_QHE in merged:
            grad_q_THE[rows] += grad_QHE
        if layout.parts:
            grads = add_returned(grads, [arrival.wait() for arrival in homeward], layout.parts)
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
    """Attention of this rank's tokens, and with ``keeps`` the keys and values it received."""
    before = sliced.before(layout.earlier) if sliced else []
    arrivals = [send_keys(k_TGE, v_TGE, part, ranks) for part in layout.parts]
    if layout.own_runs is None:
        out_THE, log_sum_exp_HT = q_THE.clone(), q_THE.new_empty(q_THE.shape[1], 0)
    else:
        arrived = [] if layout.window_rows is None else [arrival.wait() for arrival in arrivals]
        keys = _own_keys(k_TGE, v_TGE, [*arrived, *before], layout.window_rows)
        with record_function(_OWN):
            out_THE, log_sum_exp_HT = backend.forward(q_THE, *keys, layout.own_runs)
    attended = [*(layout.before for _ in before), *(part.attended for part in layout.parts)]
    if len(attended) - attended.count(None) > 1:  # a narrow type would round with every part
        out_THE = out_THE.to(torch.promote_types(out_THE.dtype, torch.float32))
    for by, arrival in zip(attended, [*(Arrival((), x, x) for x in before), *arrivals], strict=True):
        x_A2GE = arrival.wait()
        if by is not None:
            with record_function(_RECEIVED):
                _attend_received(q_THE, x_A2GE, out_THE, log_sum_exp_HT, by, backend)
    received = tuple([arrival.received for arrival in arrivals])
    if sliced is not None and not sliced.is_kept:
        sliced.keep(torch.stack(_own_keys(k_TGE, v_TGE, received, layout.slice_rows), dim=1))
    return AttentionResults(out_THE.to(q_THE.dtype), log_sum_exp_HT, received if keeps else ())


def _own_keys(k_TGE: Tensor, v_TGE: Tensor, others: Sequence[Tensor], rows: Rows | None) -> tuple[Tensor, Tensor]:
    """The ``rows`` of local keys and values and then the ``others``, (K, G, E); without ``rows`` the local ones."""
    if rows is None:
        return k_TGE, v_TGE
    k_KGE, v_KGE = (
        torch.cat([x_TGE, *(x_A2GE[:, side] for x_A2GE in others)])[rows] for side, x_TGE in enumerate((k_TGE, v_TGE))
    )
    return k_KGE, v_KGE


def _left_by_later(sliced: SliceInLayer | None, layout: ShardLayout, tokens: int) -> list[Tensor | None]:
    """What slices after this one left for local keys and values, and for those received in each part, (.., 2, G, E)."""
    counts = [tokens, *(sum(part.receive_counts) for part in layout.parts)]
    if sliced is None or (left_K2GE := sliced.take()) is None:
        return [None] * len(counts)
    everything = left_K2GE.new_zeros(sum(counts), *left_K2GE.shape[1:])
    everything[layout.slice_rows] = left_K2GE
    return [*everything.split(counts)]


def _sum(grad: Tensor, left: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (grad if left is None else grad + left).to(dtype)


def _window_gradients(grads: Sequence[Tensor], layout: ShardLayout, tokens: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradients of local keys and values, and those of received and of earlier ones, (.., 2, G, E), from (K, G, E).

    All in a wide type.
    """
    assert layout.window_sums is not None
    # Summed over the pieces that see a key, and over ranks; a narrow type would round each time.
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
    result_QHE, its_log_sum_exp_HQ = backend.forward(q_THE[rows], k_KGE, v_KGE, attended.runs)
    # Softmax over both sets of keys weights each set's output with its share of the summed exponentials.
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
    grad_q_QHE, *grads = backend.backward(grad_QHE, q_QHE, k_KGE, v_KGE, out_QHE, log_sum_exp_HQ, attended.runs)
    return grad_q_QHE, sum_rows(torch.stack(grads, dim=1), attended.key_sums)
