"""Weight gradients of linear layers, put off until a pipeline has nothing better to do.

The stage before waits for the gradient of a stage's input; nobody waits for those of its weights. ``WeightGradients``
makes two parts of a module's backward. In the first, linear layers keep their input and the gradient of their output;
in the second they compute the weights' gradients from them. All other parameters get theirs in the first part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Products = tuple[nn.Linear, Tensor, Tensor]  # of a layer's input and the gradient of its output


class WeightGradients:
    """Those of the linear layers inside ``module``, whose ``forward`` it replaces.

    Layers that torch.compile traces, that have a forward of their own or are of a class derived from ``nn.Linear`` are
    left as they are: they compute all gradients at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.products: list[Products] | None = None  # put off; None where everything is computed at once
        for layer in module.modules():
            if type(layer) is nn.Linear and "forward" not in vars(layer):
                layer.forward = partial(_forward, layer, self)  # type: ignore[method-assign]

    def put_off(self, active: bool) -> None:
        """Whether the next forward or backward puts off; it has to be the same for both of a micro-batch."""
        self.products = [] if active else None

    def later(self) -> Callable[[], None]:
        """What computes the gradients that the last backward put off, and adds them to ``.grad``; run it once."""
        products, self.products = self.products or [], None
        return partial(_compute, products)


def _forward(layer: nn.Linear, gradients: WeightGradients, x: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    at_once = torch.compiler.is_compiling() or gradients.products is None or x.dim() < 2
    if at_once or not (x.requires_grad and weight.requires_grad and weight.is_leaf):
        return F.linear(x, weight, bias)
    # Detached, or hooks of the weights would run in both parts.
    out: Tensor = _PutOff.apply(x, weight.detach(), bias if bias is None else bias.detach(), layer, gradients)
    return out


def _compute(products: list[Products]) -> None:
    """One backward for each layer, from weights to their gradients, so that what hangs on a gradient runs as ever."""
    while products:
        layer, x, gradient = products.pop()
        with torch.enable_grad():
            _Later.apply(layer.weight, layer.bias, x, gradient).backward()


class _PutOff(torch.autograd.Function):
    """A linear layer whose backward leaves ``Products`` behind."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Linear, gradients: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.gradients = layer, gradients
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        products = (ctx.layer, x.detach(), gradient)
        if ctx.gradients.products is None:
            _compute([products])
        else:
            ctx.gradients.products.append(products)
        # Under autocast the output is narrower than the weight.
        return gradient @ weight.to(gradient.dtype), None, None, None, None


class _Later(torch.autograd.Function):
    """Nothing; its backward gives weight and bias their gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.products = x.flatten(0, -2), gradient.flatten(0, -2)
        return torch.zeros((), device=weight.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        x, gradient = ctx.products
        of_bias = gradient.sum(0) if ctx.needs_input_grad[1] else None
        return gradient.t() @ x.to(gradient.dtype), of_bias, None, None
