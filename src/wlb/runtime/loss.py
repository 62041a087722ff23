"""Cross entropy of many tokens over a large vocabulary, without a float32 copy of all scores.

The plain loss casts scores (T, V) to float32, keeps their log-probabilities and makes gradients in both types. Here we
cast a chunk of rows at a time, so that memory holds only the scores and their gradient, in the type of the scores; or
the scores alone, over which the trainer writes the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ROWS = 1024  # 0.5 GiB of float32 scores for 128,000 words


def summed_cross_entropy(
    scores_TV: Tensor, labels_T: Tensor, *, chunk: int = CHUNK_ROWS, ignore_label: int = -100, overwrite: bool = False
) -> Tensor:
    """Cross entropy summed over the rows whose label is not ``ignore_label``, in float32 or better, a scalar.

    ``scores_TV`` is a plain tensor of any floating type, ``labels_T`` is int64. At most ``chunk`` rows are in the wide
    type at a time. With ``overwrite`` the backward leaves the gradient in ``scores_TV``, which nobody may read later.
    Fails for labels out of range, as ``gather`` does.
    """
    total: Tensor = _SummedCrossEntropy.apply(scores_TV, labels_T, chunk, ignore_label, overwrite)
    return total


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores_TV: Tensor, labels_T: Tensor, chunk: int, ignore_label: int, overwrite: bool
    ) -> Tensor:
        labelled_T = labels_T != ignore_label
        target_T = labels_T.where(labelled_T, 0)
        wide = torch.promote_types(scores_TV.dtype, torch.float32)
        log_sums_T = scores_TV.new_empty(len(labels_T), dtype=wide)
        for log_sums, scores in zip(log_sums_T.split(chunk), scores_TV.split(chunk), strict=True):
            log_sums.copy_(scores.to(wide).logsumexp(dim=-1))
        scores_of_target_T = scores_TV.gather(-1, target_T[:, None])[:, 0].to(wide)  # fails for labels out of range
        ctx.save_for_backward(scores_TV, target_T, labelled_T, log_sums_T)
        ctx.chunk, ctx.overwrite = chunk, overwrite
        return (log_sums_T - scores_of_target_T).where(labelled_T, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        scores_TV, *of_rows = ctx.saved_tensors
        grad_TV = scores_TV.detach() if ctx.overwrite else torch.empty_like(scores_TV)
        chunks = zip(*(x.split(ctx.chunk) for x in (grad_TV, scores_TV, *of_rows)), strict=True)
        for grad_scores, scores, target, labelled, log_sums in chunks:
            shares = scores.to(log_sums.dtype, copy=True).sub_(log_sums[:, None]).exp_()
            shares[torch.arange(len(target), device=target.device), target] -= 1.0  # scatter_ is not deterministic
            grad_scores.copy_(shares.mul_((grad * labelled)[:, None]))
            del shares  # otherwise memory would hold two chunks
        return grad_TV, None, None, None, None
