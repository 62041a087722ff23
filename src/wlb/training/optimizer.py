"""AdamW, its learning rate at every step, and the norm of gradients that are sharded over the whole job."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wlb.job.config import TrainingConfig
from wlb.models.transformer import Transformer

_FINAL_FRACTION = 0.1  # of the peak learning rate, at the end of the decay
_DECAY_FRACTION = 0.2  # of all steps, the last ones, in which wsd decays


def build_optimizer(stage: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW for one model stage; weight decay acts on matrices, not on norms and other vectors."""
    alike = defaultdict[tuple[bool, Any], list[Tensor]](list)  # one kernel takes weights of one mesh only
    for parameter in stage.parameters():
        alike[parameter.ndim >= 2, getattr(parameter, "device_mesh", None)].append(parameter)
    groups = [
        {"params": of_group, "weight_decay": config.weight_decay * decays} for (decays, _), of_group in alike.items()
    ]
    # One kernel for all weights of a group, in place of ten for each. On CPUs it would compute other bits.
    fused = next(stage.parameters()).device.type == "cuda"
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The learning rate of step 1, 2, ...: ``training.warmup_steps`` of linear warm-up, then ``training.lr_schedule``.

    - ``cosine`` falls to a tenth of the peak at the end;
    - ``wsd`` (warm-up, stable, decay; MiniCPM, arXiv 2404.06395, section 4.2) stays at the peak and falls in a straight
      line to a tenth over the last fifth of all steps;
    - ``constant`` stays at the peak.

    The end is ``training.steps``; without it the rate stays at the peak. Resuming needs no state for this.
    """
    peak = config.learning_rate
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    last = config.steps
    if last is None or config.lr_schedule == "constant":
        return peak
    if config.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * _progress(step, config.warmup_steps, last)))
    else:
        left = 1 - _progress(step, max(config.warmup_steps, last * (1 - _DECAY_FRACTION)), last)
    return peak * (_FINAL_FRACTION + (1 - _FINAL_FRACTION) * left)


def _progress(step: int, first: float, last: int) -> float:
    """0 up to step ``first``, 1 from step ``last`` on."""
    return min(1.0, max(0.0, step - first) / max(1.0, last - first))


@torch.no_grad()
def clip_gradients(stages: Sequence[Transformer], largest: float) -> float:
    """Scale all gradients of the job so that their global 2-norm is at most ``largest``; 0 only measures.

    Every rank adds the squares of its shards of its stages. Returns the norm before clipping, the same on every rank.
    """
    counted = [(p.grad, _share(stage, p)) for stage in stages for p in stage.parameters() if p.grad is not None]
    gradients = [grad.to_local() if isinstance(grad, DTensor) else grad for grad, _ in counted]
    squares = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for (_, share), part in zip(counted, torch._foreach_norm(gradients), strict=True):
        squares += part.double() ** 2 * share
    dist.all_reduce(squares)
    norm = math.sqrt(squares.item())
    if 0 < largest < norm:
        torch._foreach_mul_(gradients, largest / norm)
    return norm


def _share(stage: Transformer, parameter: Tensor) -> float:
    """The weight of this rank's part in the sum, so that parts which several ranks hold count once.

    All tensor-parallel ranks hold the weights that they do not split, and several stages may hold a head or a tied
    embedding, which counts in the first stage only.
    """
    copies = 1
    if any(parameter is weight for weight in stage.tied_VD):
        if not stage.is_first:
            return 0.0
    elif stage.head is not None and any(parameter is weight for weight in stage.head.parameters()):
        copies = stage.dealt_heads or 1
    if not isinstance(parameter, DTensor):
        return 1 / copies
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return 1 / (copies * math.prod(size for size, placement in sizes if placement.is_replicate()))
