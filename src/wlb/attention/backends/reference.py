"""The oracle: dense scores, an explicit mask, one run at a time.

Nothing is fused and nothing is skipped, so what it computes can be read off the code; float64 stays float64
and types below float32 are computed in float32.

Shapes: q queries · k keys · g key/value heads · r query heads that share one · d head_dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wlb.attention.runs import Runs


def unsupported(query: Tensor) -> str | None:
    """The reference runs everywhere."""
    return None


def forward(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, as ``AttentionBackend.forward``."""
    outs, log_sum_exps = zip(*(_forward_one(*run, runs) for run in _cut(query, key, value, runs)), strict=True)
    return torch.cat(outs).to(query.dtype), torch.cat(log_sum_exps, dim=-1)


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor, runs: Runs
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, as ``AttentionBackend.backward``."""
    exact = torch.promote_types(query.dtype, torch.float32)
    # What the softmax subtracts from every score's gradient: the output's gradient along the output.
    delta = (grad_out.to(exact) * out.to(exact)).sum(dim=-1)
    lengths = runs.query_lengths
    per_query = zip(grad_out.to(exact).split(lengths), log_sum_exp.T.split(lengths), delta.split(lengths), strict=True)
    cut = zip(_cut(query, key, value, runs), per_query, strict=True)
    grads = zip(*(_backward_one(*tensors, *rest, runs) for tensors, rest in cut), strict=True)
    grad_query, grad_key, grad_value = (torch.cat(pieces).to(query.dtype) for pieces in grads)
    return grad_query, grad_key, grad_value


def _cut(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each run's query (q, g, r, d), key and value (k, g, d), in the type to compute in."""
    exact = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(exact).unflatten(1, (key.shape[1], -1))
    return list(
        zip(
            grouped.split(runs.query_lengths),
            key.to(exact).split(runs.key_lengths),
            value.to(exact).split(runs.key_lengths),
            strict=True,
        )
    )


def _scores(query: Tensor, key: Tensor, runs: Runs) -> Tensor:
    scores = torch.einsum("qgrd,kgd->grqk", query, key) / math.sqrt(query.shape[-1])
    if not runs.causal:
        return scores
    before = len(key) - len(query)  # keys before the first query's own; none without a window
    everything = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
    hidden = everything.triu(diagonal=before + 1)
    if runs.window is not None:
        hidden |= everything.tril(diagonal=before - runs.window)
    return scores.masked_fill(hidden, float("-inf"))


def _forward_one(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, runs)
    out = torch.einsum("grqk,kgd->qgrd", scores.softmax(dim=-1), value)
    return out.flatten(1, 2), scores.logsumexp(dim=-1).flatten(0, 1)


def _backward_one(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, log_sum_exp: Tensor, delta: Tensor, runs: Runs
) -> tuple[Tensor, Tensor, Tensor]:
    groups = (key.shape[1], -1)
    grad_out = grad_out.unflatten(1, groups)
    weights = (_scores(query, key, runs) - log_sum_exp.T.unflatten(0, groups)[..., None]).exp()
    grad_weights = torch.einsum("qgrd,kgd->grqk", grad_out, value)
    grad_scores = weights * (grad_weights - delta.T.unflatten(0, groups)[..., None]) / math.sqrt(query.shape[-1])
    return (
        torch.einsum("grqk,kgd->qgrd", grad_scores, key).flatten(1, 2),
        torch.einsum("grqk,qgrd->kgd", grad_scores, query),
        torch.einsum("grqk,qgrd->kgd", weights, grad_out),
    )
