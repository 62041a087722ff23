"""A backward in two parts: first the gradient of the input, which another stage needs, later those of the weights.

In the first part linear layers keep their input and the gradient of their output. In the second part they compute the
gradients of weight and bias from these, of several micro-batches in one product, because reading and writing a gradient
takes as long as the product of a few hundred rows. All other parameters get their gradients in the first part.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule

from wlb.runtime.own_lists import end_backward
from wlb.workload.costs import PRODUCT_ROWS

_Rows = tuple[Tensor, Tensor]  # an input and the gradient of its output


class WeightGradients:
    """Defers the weight gradients of the linear layers inside ``module``, and replaces their ``forward``.

    It defers nothing for layers that torch.compile traces, whose weights have hooks, or of a subclass of ``nn.Linear``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.put_off: list[tuple[nn.Linear, _Rows]] | None = None
        self._module, self._row_count = module, 0
        self.joined: dict[nn.Linear, list[_Rows]] = {}
        for layer in module.modules():
            if type(layer) is nn.Linear and "forward" not in vars(layer):
                layer.forward = partial(_forward, layer, self)  # type: ignore[method-assign]

    def begin(self, in_two_parts: bool) -> None:
        """Call this before a forward, and before its backward."""
        self.put_off = [] if in_two_parts else None

    def end(self) -> Callable[[], None]:
        """Call this after a backward; returns its second part, which joins the next product. Run that once."""
        put_off, self.put_off = self.put_off or [], None
        return partial(self._join, put_off)

    def _join(self, put_off: list[tuple[nn.Linear, _Rows]]) -> None:
        count = max((len(x) for _, (x, _) in put_off), default=0)
        if self.joined and self._row_count + count > PRODUCT_ROWS:
            self.compute()
        self._row_count += count
        while put_off:
            layer, rows = put_off.pop()
            self.joined.setdefault(layer, []).append(rows)

    def compute(self) -> None:
        """Compute the product of all that joined, and add it to ``.grad``; FSDP2 accumulates that unit by unit."""
        units = [one for one in self._module.modules() if isinstance(one, FSDPModule) or one is self._module]
        for unit in reversed(units):
            for layer in unit.modules():
                if isinstance(layer, nn.Linear) and layer in self.joined:
                    _add(layer, self.joined.pop(layer))
            if isinstance(unit, FSDPModule):
                end_backward(unit)
        self._row_count = 0


def _forward(layer: nn.Linear, gradients: WeightGradients, x: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    at_once = torch.compiler.is_compiling() or gradients.put_off is None
    if at_once or not (x.requires_grad and x.dim() > 1 and all(map(_is_plain, layer.parameters()))):
        return F.linear(x, weight, bias)
    out: Tensor = _PutOff.apply(x, weight.detach(), bias if bias is None else bias.detach(), layer, gradients)
    return out


def _is_plain(weight: Tensor) -> bool:
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return weight.is_leaf and weight.requires_grad and not hooks


class _PutOff(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Linear, gradients: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.gradients = layer, gradients
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = x.detach().flatten(0, -2), gradient.flatten(0, -2)
        if ctx.gradients.put_off is None:
            _add(ctx.layer, [rows])
        else:
            ctx.gradients.put_off.append((ctx.layer, rows))
        return gradient @ weight.to(gradient.dtype), None, None, None, None  # narrower than the weight under autocast


@torch.no_grad()
def _add(layer: nn.Linear, parts: Sequence[_Rows]) -> None:
    """Add the gradients of ``layer`` for all rows of ``parts``."""
    x, gradient = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    columns = gradient.t()
    of_bias = () if layer.bias is None else ((layer.bias, columns.sum(1)),)
    for weight, more in ((layer.weight, columns @ x.to(gradient.dtype)), *of_bias):
        more = more.to(weight.grad_dtype)
        weight.grad = more if weight.grad is None else weight.grad.add_(more)
