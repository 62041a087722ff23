"""A mixture of experts in place of a feed-forward layer, dropless, on one GPU or divided over expert-parallel ranks.

A router sends each token to a few experts, and weighs their outputs. Experts are divided over the ranks of ``group``:
tokens travel to the rank of their expert and back (GShard, arXiv 2006.16668, section 3.2), so all ranks of the group
run the layer together, even without tokens. No token is dropped. Packing must not change the mathematics, so nothing
here depends on a micro-batch as a whole; ``wlb.runtime.routers`` has the losses.

Shapes: N tokens · D hidden · E experts of the layer · K experts of a token · F width of an expert.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import DTensor

from wlb.runtime.routers import counted, router_losses
from wlb.workload import ModelShape
from wlb.workload.shapes import Experts

_ALIGNED = 16  # bytes of a row, of which grouped products need a multiple


@dataclass
class Routing:
    """What the routers need to know of a micro-batch, and the tokens that each of its experts got.

    ``rows`` are the tokens of this rank's tensor-parallel group; padding follows, which counts nowhere. ``balance`` and
    ``z`` weigh the losses of a token: the coefficients over the tokens of the step. ``counts`` (E,) are by layer, so
    that a layer that is computed again in the backward does not count twice.
    """

    rows: int
    balance: float = 0.0
    z: float = 0.0
    counts: dict[int, Tensor] = field(default_factory=dict)


class MixtureOfExperts(nn.Module):
    """The experts of block ``layer``, their router, and a shared expert that every token passes through.

    A softmax router weighs the chosen experts by their softmax (Mixtral, arXiv 2401.04088). A sigmoid router scores
    every expert by itself, and chooses with a bias per expert that is not trained (DeepSeek-V3, arXiv 2412.19437,
    section 2.1.2). ``bias`` and ``shares``, of the tokens of the last step, are state (``end_step``).
    """

    bias: Tensor
    shares: Tensor

    def __init__(self, hidden: int, shape: Experts, router: str, layer: int, shared: nn.Module | None) -> None:
        super().__init__()
        self.layer, self.active, self.scores = layer, shape.active, router
        self.router = nn.Linear(hidden, shape.count, bias=False)
        self.experts = GroupedExperts(hidden, shape)
        self.shared = shared
        self.register_buffer("bias", torch.empty(shape.count))
        self.register_buffer("shares", torch.empty(shape.count))
        self.group: dist.ProcessGroup | None = None  # of the ranks that divide the experts
        self.tp_rank = 0  # tensor-parallel ranks divide the tokens
        self.reset_state()

    @torch.no_grad()
    def reset_state(self) -> None:
        """The state before the first step."""
        self.bias.zero_()
        self.shares.fill_(1 / len(self.shares))

    def forward(self, x_ND: Tensor, routing: Routing | None = None) -> Tensor:
        logits_NE = self.router(x_ND)
        logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
        scores_NE = logits_NE.sigmoid() if self.scores == "sigmoid" else logits_NE.softmax(-1)
        chosen_NK = (scores_NE + self.bias).topk(self.active).indices
        weights_NK = scores_NE.gather(-1, chosen_NK)
        weights_NK = (weights_NK / weights_NK.sum(-1, keepdim=True)).to(x_ND.dtype)

        order, back = _in_order(chosen_NK.flatten())
        rows = _Permuted.apply(x_ND.repeat_interleave(self.active, 0), order, back)
        found = self._computed(rows, counted(chosen_NK, len(self.bias)))
        found_NKD = _Permuted.apply(found, back, order).unflatten(0, chosen_NK.shape)
        out_ND: Tensor = (found_NKD * weights_NK[..., None]).sum(1)
        if self.shared is not None:
            out_ND = out_ND + self.shared(x_ND)
        if routing is not None:
            real = self._counted(chosen_NK, routing)
            of_tokens = logits_NE[:real], scores_NE[:real], self.shares
            out_ND = _WithLoss.apply(out_ND, router_losses(*of_tokens, routing.balance, routing.z))
        return out_ND

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled, it would be another function for every layer
    def _counted(self, chosen_NK: Tensor, routing: Routing) -> int:
        """The number of tokens here that are no padding, once they are counted in ``routing``."""
        tokens = len(chosen_NK)
        real = min(tokens, max(0, routing.rows - self.tp_rank * tokens))
        routing.counts[self.layer] = counted(chosen_NK[:real], len(self.bias))
        return real

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # its shapes follow from routing
    def _computed(self, rows: Tensor, counts_E: Tensor) -> Tensor:
        """The outputs of the experts for ``rows`` in the order of experts, ``counts_E`` of each."""
        if self.group is None:
            alone: Tensor = self.experts(rows, counts_E)
            return alone
        send, receive, arriving = exchanged_counts(counts_E, self.group)
        # By source, then expert; the order of the results must not depend on who was first.
        expert = torch.arange(arriving.shape[1], device=rows.device).repeat(len(arriving))
        expert = expert.repeat_interleave(arriving.flatten(), output_size=sum(receive))
        order, back = _in_order(expert)
        arrived = all_to_all_single_autograd(rows, receive, send, self.group)
        found = self.experts(_Permuted.apply(arrived, order, back), arriving.sum(0))
        return all_to_all_single_autograd(_Permuted.apply(found, back, order), send, receive, self.group)


class GroupedExperts(nn.Module):
    """SwiGLU experts that are all here, one after another in the rows of three matrices.

    ``w1`` and ``w3`` have shape (experts x F, D), and ``w2`` (experts x D, F).
    """

    def __init__(self, hidden: int, shape: Experts) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(shape.count * shape.ffn_hidden, hidden))
        self.w2 = nn.Parameter(torch.empty(shape.count * hidden, shape.ffn_hidden))
        self.w3 = nn.Parameter(torch.empty(shape.count * shape.ffn_hidden, hidden))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """``rows`` (rows, D) in the order of the experts here, ``counts`` of each."""
        held = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.w1, self.w2, self.w3)]
        w1, w2, w3 = (weight.unflatten(0, (len(counts), -1)).mT for weight in held)
        if _can_group(rows, w1):
            ends = counts.cumsum(0).to(torch.int32)
            hidden = F.silu(F.grouped_mm(rows, w1, offs=ends)) * F.grouped_mm(rows, w3, offs=ends)
            out: Tensor = F.grouped_mm(hidden, w2, offs=ends)
            return out
        parts = zip(rows.split(counts.tolist()), w1, w2, w3, strict=True)
        return torch.cat([(F.silu(x @ one) * (x @ three)) @ two for x, one, two, three in parts])


def _can_group(rows: Tensor, weights: Tensor) -> bool:
    """Whether one kernel may compute all experts: not in float64, nor for widths that are not aligned."""
    aligned = all(size * rows.element_size() % _ALIGNED == 0 for size in weights.shape[1:])
    return aligned and len(rows) > 0 and rows.dtype == (torch.bfloat16 if rows.is_cuda else torch.float32)


def exchanged_counts(counts_E: Tensor, group: dist.ProcessGroup) -> tuple[list[int], list[int], Tensor]:
    """Rows to send to each rank of ``group`` and to receive from it, and those that arrive: (ranks, experts here)."""
    arriving = torch.empty_like(counts_E)
    dist.all_to_all_single(arriving, counts_E, group=group)
    tables = torch.stack([counts_E, arriving]).unflatten(1, (dist.get_world_size(group), -1))
    send, receive = tables.sum(-1).tolist()
    return send, receive, tables[1]


def _in_order(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The stable order of ``keys``, and its inverse."""
    order = keys.argsort(stable=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Permuted(torch.autograd.Function):
    """``rows[order]``; ``back`` is the inverse, so the backward needs no sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient[back], None, None


class _WithLoss(torch.autograd.Function):
    """The first input. The gradient of the second, a scalar, is 1, as if it were added to the loss of the step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(ctx.like)


def mixtures(modules: Iterable[nn.Module]) -> dict[int, MixtureOfExperts]:
    """The mixtures of experts in ``modules``, by their layer."""
    inside = (part for module in modules for part in module.modules())
    return {part.layer: part for part in inside if isinstance(part, MixtureOfExperts)}


@torch.no_grad()
def end_step(
    mixed: Mapping[int, MixtureOfExperts],
    routed: Sequence[Routing],
    shape: ModelShape,
    device: torch.device,
    rate: float,
) -> Tensor:
    """Set the state of the layers ``mixed`` of this rank after a step; all ranks of the job call it together.

    ``routed`` are this rank's micro-batches. ``rate`` moves each bias of a sigmoid router against the load of its
    expert (arXiv 2408.15664, section 3). Returns the tokens of each expert over all ranks, (routed layers, E) int64.
    """
    assert shape.experts is not None
    counts_LE = torch.zeros(shape.layers, shape.experts.count, dtype=torch.int64, device=device)
    for routing in routed:
        for layer, counts_E in routing.counts.items():
            counts_LE[layer] += counts_E
    if dist.is_initialized():
        dist.all_reduce(counts_LE)
    for layer, part in mixed.items():
        counts_E = counts_LE[layer].to(part.shares.dtype)
        part.shares.copy_(counts_E / counts_E.sum())
        if part.scores == "sigmoid":
            part.bias += rate * (counts_E.mean() - counts_E).sign()
    return counts_LE[shape.experts.dense_layers :]
