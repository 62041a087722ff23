"""Weight gradients of linear layers, put off until a pipeline has nothing better to do.

A backward in two parts first computes the gradient of its input, for which the stage before it waits; nobody waits for
the weights'. ``WeightGradients`` splits a module's backward in this way. Linear layers keep their input and the gradient
of their output and compute the weights' gradients later; all other parameters get theirs in the first part.
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
    at_once = torch.compiler.is_compiling() or gradients.products is None
    if at_once or x.dim() < 2 or not (weight.requires_grad and weight.is_leaf):
        return F.linear(x, weight, bias)
    out: Tensor = _PutOff.apply(x, weight, bias, layer, gradients)
    return out


def _compute(products: list[Products]) -> None:
    """One backward for each layer, from weights to their gradients, so that what hangs on a gradient runs as ever."""
    while products:
        layer, x, gradient = products.pop()
        _Later.apply(layer.weight, layer.bias, layer, x, gradient).backward()


def _weight_gradients(layer: nn.Linear, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    # Under autocast the output is narrower than input and weight.
    columns, rows = gradient.flatten(0, -2), x.flatten(0, -2).to(gradient.dtype)
    return columns.t() @ rows, columns.sum(0) if layer.bias is not None else None


class _PutOff(torch.autograd.Function):
    """A linear layer whose backward leaves ``Products`` in place of the gradients of weight and bias."""

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
        of_weight, of_bias = None, None
        if ctx.gradients.products is None:
            of_weight, of_bias = _weight_gradients(ctx.layer, x, gradient)
        else:
            ctx.gradients.products.append((ctx.layer, x.detach(), gradient))
        of_input = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        return of_input, of_weight, of_bias, None, None


class _Later(torch.autograd.Function):
    """Nothing; its backward gives weight and bias their gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, *products: Any) -> Tensor:
        ctx.products = products
        return torch.zeros((), device=weight.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*_weight_gradients(*ctx.products), None, None, None)
