"""The oracle: dense scores, an explicit mask, one sequence at a time.

Nothing is fused or skipped, so the code shows what is computed. float64 stays float64, and narrower types are computed
in float32.

R is the number of query heads that share a key/value head; ``wlb.attention`` explains the other letters.
"""

import math

import torch
from torch import Tensor

from wlb.attention.variable_length import VariableLengthBatch


def unsupported(query: Tensor) -> str | None:
    """The reference runs everywhere."""
    return None


def forward(q_QHE: Tensor, k_KGE: Tensor, v_KGE: Tensor, batch: VariableLengthBatch) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, as ``AttentionBackend.forward``."""
    outs, log_sum_exps = zip(*(_forward_one(*run, batch) for run in _cut(q_QHE, k_KGE, v_KGE, batch)), strict=True)
    return torch.cat(outs).to(q_QHE.dtype), torch.cat(log_sum_exps, dim=-1)


def backward(
    grad_QHE: Tensor,
    q_QHE: Tensor,
    k_KGE: Tensor,
    v_KGE: Tensor,
    out_QHE: Tensor,
    log_sum_exp_HQ: Tensor,
    batch: VariableLengthBatch,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, as ``AttentionBackend.backward``."""
    exact = torch.promote_types(q_QHE.dtype, torch.float32)
    # The softmax subtracts this from the gradient of every score: the dot product of output and its gradient.
    delta_QH = (grad_QHE.to(exact) * out_QHE.to(exact)).sum(dim=-1)
    split = [x.split(batch.query_lengths) for x in (grad_QHE.to(exact), log_sum_exp_HQ.T, delta_QH)]
    cut = zip(_cut(q_QHE, k_KGE, v_KGE, batch), split[0], split[1], split[2], strict=True)
    grads = zip(*(_backward_one(*qkv, grad, sums, delta, batch) for qkv, grad, sums, delta in cut), strict=True)
    grad_q_QHE, grad_k_KGE, grad_v_KGE = (torch.cat(pieces).to(q_QHE.dtype) for pieces in grads)
    return grad_q_QHE, grad_k_KGE, grad_v_KGE


def _cut(
    q_QHE: Tensor, k_KGE: Tensor, v_KGE: Tensor, batch: VariableLengthBatch
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Query (Q, G, R, E), key and value (K, G, E) of each sequence, in the type to compute in."""
    exact = torch.promote_types(q_QHE.dtype, torch.float32)
    q_QGRE = q_QHE.to(exact).unflatten(1, (k_KGE.shape[1], -1))
    keys = (x_KGE.to(exact).split(batch.key_lengths) for x_KGE in (k_KGE, v_KGE))
    return list(zip(q_QGRE.split(batch.query_lengths), *keys, strict=True))


def _scores(q_QGRE: Tensor, k_KGE: Tensor, batch: VariableLengthBatch) -> Tensor:
    scores_GRQK = torch.einsum("qgre,kge->grqk", q_QGRE, k_KGE) / math.sqrt(q_QGRE.shape[-1])
    if not batch.causal:
        return scores_GRQK
    before = len(k_KGE) - len(q_QGRE)  # keys before that of the first query; none without a window
    everything_QK = torch.ones(scores_GRQK.shape[-2:], dtype=torch.bool, device=q_QGRE.device)
    hidden_QK = everything_QK.triu(diagonal=before + 1)
    if batch.window is not None:
        hidden_QK |= everything_QK.tril(diagonal=before - batch.window)
    return scores_GRQK.masked_fill(hidden_QK, float("-inf"))


def _forward_one(q_QGRE: Tensor, k_KGE: Tensor, v_KGE: Tensor, batch: VariableLengthBatch) -> tuple[Tensor, Tensor]:
    scores_GRQK = _scores(q_QGRE, k_KGE, batch)
    out_QGRE = torch.einsum("grqk,kge->qgre", scores_GRQK.softmax(dim=-1), v_KGE)
    return out_QGRE.flatten(1, 2), scores_GRQK.logsumexp(dim=-1).flatten(0, 1)


def _backward_one(
    q_QGRE: Tensor,
    k_KGE: Tensor,
    v_KGE: Tensor,
    grad_QHE: Tensor,
    log_sum_exp_QH: Tensor,
    delta_QH: Tensor,
    batch: VariableLengthBatch,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = q_QGRE.shape[1:3]
    grad_QGRE = grad_QHE.unflatten(1, groups)
    log_sum_exp_GRQ, delta_GRQ = (x_QH.T.unflatten(0, groups) for x_QH in (log_sum_exp_QH, delta_QH))
    weights_GRQK = (_scores(q_QGRE, k_KGE, batch) - log_sum_exp_GRQ[..., None]).exp()
    grad_weights_GRQK = torch.einsum("qgre,kge->grqk", grad_QGRE, v_KGE)
    grad_scores_GRQK = weights_GRQK * (grad_weights_GRQK - delta_GRQ[..., None]) / math.sqrt(q_QGRE.shape[-1])
    return (
        torch.einsum("grqk,kge->qgre", grad_scores_GRQK, k_KGE).flatten(1, 2),
        torch.einsum("grqk,qgre->kge", grad_scores_GRQK, q_QGRE),
        torch.einsum("grqk,qgre->kge", weights_GRQK, grad_QGRE),
    )
