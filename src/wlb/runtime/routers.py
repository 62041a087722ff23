"""Losses of the routers of a mixture of experts that packing cannot change: sums over the tokens of a step.

The usual balance loss multiplies, in every micro-batch, the share of tokens that an expert got by its mean probability;
so it depends on which documents are packed together. That of the whole batch (arXiv 2501.11873) does not. It needs the
shares of all tokens of the step, which are not known before its last micro-batch; so the shares of the step before take
their place. A z-loss (ST-MoE, arXiv 2202.08906, section 3.2) is a sum over tokens anyway.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.errors import UserError
from wlb.runtime.batch import Batch


def router_losses(logits_NE: Tensor, scores_NE: Tensor, shares_E: Tensor, balance: float, z: float) -> Tensor:
    """The weighted losses of N tokens, a scalar; 0 if their probabilities and ``shares_E`` are even, and z is 0.

    ``scores_NE`` are positive, and ``shares_E`` of the tokens of the step before add up to 1.
    """
    loss = logits_NE.new_zeros(())
    if balance:
        probabilities_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
        excess = len(shares_E) * (probabilities_NE @ shares_E.to(probabilities_NE.dtype)) - 1
        loss = loss + balance * excess.sum()
    return loss + z * logits_NE.logsumexp(-1).square().sum() if z else loss


def counted(chosen: Tensor, experts: int) -> Tensor:
    """How often each of ``experts`` is in ``chosen``, (experts,) int64; on a GPU the host does not wait for it."""
    flat = chosen.flatten()
    return flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))


class RouterLosses:
    """The losses of the softmax routers of a model in a loop of your own, with the shares of the last step as state.

    ``balance`` and ``z`` weigh the losses of a token in each layer. All processes of ``group`` call ``end_step``.
    docs/experts.md has a loop.
    """

    def __init__(
        self, experts_per_token: int, *, balance: float = 0.01, z: float = 0.0, group: dist.ProcessGroup | None = None
    ) -> None:
        self._active, self._weights, self._group = experts_per_token, (balance, z), group
        self._shares_LE: Tensor | None = None
        self._counts_LE: Tensor | None = None

    def of(self, batch: Batch, router_logits: Sequence[Tensor]) -> Tensor:
        """The losses of ``batch``, for ``Batch.loss``; ``router_logits`` are (tokens, experts) of each routed layer."""
        if any(len(logits) != len(batch.tokens) for logits in router_logits) or not router_logits:
            shapes = ", ".join(str(tuple(logits.shape)) for logits in router_logits[:2])
            raise UserError(f"router_logits are {shapes or 'none'}, not ({len(batch.tokens)}, experts) in every layer")
        wide = [
            logits[: batch.own_tokens].to(torch.promote_types(logits.dtype, torch.float32)) for logits in router_logits
        ]
        together_LE = torch.stack([counted(logits.topk(self._active).indices, logits.shape[-1]) for logits in wide])
        self._counts_LE = together_LE if self._counts_LE is None else self._counts_LE + together_LE
        if self._shares_LE is None:
            self._shares_LE = torch.full_like(together_LE, 1 / together_LE.shape[1], dtype=torch.float64)
        pairs = zip(wide, self._shares_LE.to(wide[0].device), strict=True)
        return torch.stack([router_losses(one, one.softmax(-1), shares, *self._weights) for one, shares in pairs]).sum()

    def end_step(self) -> None:
        """Take the shares of the step for the next one; a collective call."""
        if self._counts_LE is None:
            raise UserError("no losses were computed in this step; call of(batch, router_logits) in each micro-batch")
        if dist.is_initialized():
            dist.all_reduce(self._counts_LE, group=self._group)
        self._shares_LE = self._counts_LE.double() / self._counts_LE.sum(-1, keepdim=True)
        self._counts_LE = None

    def state_dict(self) -> dict[str, Any]:
        """The shares after the last step, to save with the model; the same on all processes."""
        return {"shares": self._shares_LE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._shares_LE = state["shares"]
