"""The loss of a micro-batch as part of its step, without a float32 copy of all scores.

The loss of a step is the cross entropy summed over its labelled tokens, divided by their number on all ranks. PyTorch's
casts scores (T, V) to float32, keeps their log-probabilities and makes gradients in both types. Here we cast a chunk of
rows at a time, so that memory holds only the scores and their gradient, in the type of the scores; or the scores alone,
over which the trainer writes the gradient.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # DCP's

from wlb.runtime.collectives import warn

CHUNK_ROWS = 1024  # 0.5 GiB of float32 scores for 128,000 words
IGNORE_LABEL = -100  # cross_entropy's default ignore_index
NO_LABELS = "a step has no labelled token, so its loss and gradients are zero; check its labels and masks"


def packed_loss(
    logits: Tensor, labels: Tensor, loss_tokens: int, *, averaged_over: int, overwrite: bool = False
) -> Tensor:
    """The loss of a micro-batch in a step with ``loss_tokens`` labels: a scalar, in float32 or better.

    ``logits`` are (tokens, vocabulary), ``labels`` (tokens,), -100 for none. ``averaged_over`` ranks average gradients;
    1 if summed. Warns for a step without labels, whose loss is zero. ``token_losses`` explains ``overwrite``, and
    tensor-parallel ``logits``, for which all ranks get the loss.
    """
    if loss_tokens == 0:
        warn(NO_LABELS)
    return token_losses(logits, labels, overwrite=overwrite).sum() * averaged_over / max(loss_tokens, 1)


def token_losses(scores_TV: Tensor, labels_T: Tensor, *, chunk: int = CHUNK_ROWS, overwrite: bool = False) -> Tensor:
    """Cross entropy of each row (T,), in float32 or better; zero for the label -100.

    ``scores_TV`` has any floating type, ``labels_T`` is int64. At most ``chunk`` rows are in the wide type at a time.
    With ``overwrite`` the backward leaves the gradient in ``scores_TV``, which nobody may read later. Scores that
    tensor-parallel ranks split by vocabulary are a ``DTensor``; all ranks get the losses (Megatron-LM, arXiv
    1909.08053, section 3). Fails for labels out of range.
    """
    part = _Part(None, 0)
    if isinstance(scores_TV, DTensor):
        mesh, placements = scores_TV.device_mesh, scores_TV.placements
        if not placements[0].is_replicate():
            _, (_, start) = compute_local_shape_and_global_offset(scores_TV.shape, mesh, placements)
            part = _Part(mesh.get_group(), start, mesh.get_local_rank() == 0, mesh.get_local_rank() == mesh.size() - 1)
        scores_TV = scores_TV.to_local()
    losses_T: Tensor = _CrossEntropy.apply(scores_TV, labels_T, chunk, overwrite, part)
    return losses_T


class _Part(NamedTuple):
    """The words of this rank begin at ``start``; ``group`` has the ranks with the others, the ``first`` to the last."""

    group: dist.ProcessGroup | None
    start: int
    is_first: bool = True
    is_last: bool = True


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_TV: Tensor, labels_T: Tensor, chunk: int, overwrite: bool, part: _Part) -> Tensor:
        labelled_T, target_T = labels_T != IGNORE_LABEL, labels_T - part.start
        mine_T = labelled_T.clone()  # also labels that are out of range, so that the index below is
        if not part.is_first:
            mine_T &= target_T >= 0
        if not part.is_last:
            mine_T &= target_T < scores_TV.shape[1]
        target_T = target_T.where(mine_T, 0)
        wide = torch.promote_types(scores_TV.dtype, torch.float32)
        log_sums_T = scores_TV.new_empty(len(labels_T), dtype=wide)
        for log_sums, scores in zip(log_sums_T.split(chunk), scores_TV.split(chunk), strict=True):
            log_sums.copy_(scores.to(wide).logsumexp(dim=-1))
        scores_of_target_T = scores_TV.gather(-1, target_T[:, None])[:, 0].to(wide)  # fails for labels out of range
        if part.group is not None:
            most_T = all_reduce(log_sums_T, "max", part.group)
            own_2T = torch.stack([(log_sums_T - most_T).exp(), scores_of_target_T.where(mine_T, 0.0)])
            sums_T, scores_of_target_T = all_reduce(own_2T, "sum", part.group)
            log_sums_T = most_T + sums_T.log()
        ctx.save_for_backward(scores_TV, target_T, labelled_T, mine_T, log_sums_T)
        ctx.chunk, ctx.overwrite = chunk, overwrite
        return (log_sums_T - scores_of_target_T).where(labelled_T, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None, None]:
        scores_TV, target_T, labelled_T, mine_T, log_sums_T = ctx.saved_tensors
        of_rows = target_T, mine_T.to(log_sums_T.dtype), grad_T * labelled_T, log_sums_T
        grad_TV = scores_TV.detach() if ctx.overwrite else torch.empty_like(scores_TV)
        chunks = zip(*(x.split(ctx.chunk) for x in (grad_TV, scores_TV, *of_rows)), strict=True)
        for grad_scores, scores, target, mine, grad, log_sums in chunks:
            shares = scores.to(log_sums.dtype, copy=True).sub_(log_sums[:, None]).exp_()
            shares[torch.arange(len(target), device=target.device), target] -= mine  # scatter_ is not deterministic
            grad_scores.copy_(shares.mul_(grad[:, None]))
            del shares  # otherwise memory would hold two chunks
        return grad_TV, None, None, None, None
