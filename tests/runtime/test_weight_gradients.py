"""A backward in two parts gives the gradients of one, whatever is around the linear layers."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cases import in_turn
from wlb.runtime import weight_gradients
from wlb.runtime.weight_gradients import WeightGradients


class Layers(nn.Module):
    """Linear layers with and without bias, one used twice; and some that put off nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.second = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.vector, self.hooked = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.hooked.weight.register_hook(lambda gradient: gradient * 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.hooked(self.first(torch.tanh(self.first(self.norm(x))))) * self.vector(x[0, 0])
        out: Tensor = self.frozen(self.second(torch.tanh(x)))
        return out


def _recomputed(layers: Layers, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(layers, x, use_reentrant=False)
    return out


def _backward(run: Callable[[Tensor], Tensor], context: AbstractContextManager[object]) -> Tensor:
    dtype = torch.float32 if isinstance(context, torch.autocast) else torch.float64
    x = torch.linspace(-1, 1, 60, dtype=dtype).view(2, 5, 6).requires_grad_()
    with context:
        out = run(x)
    out.square().sum().backward()
    assert x.grad is not None
    return x.grad


def _gradients(layers: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in layers.named_parameters() if weight.grad is not None}


@in_turn(
    ("run", "context"),
    [
        (Layers.forward, nullcontext()),
        (_recomputed, nullcontext()),
        (Layers.forward, torch.autocast("cpu", torch.bfloat16)),
    ],
)
def test_two_parts_are_a_whole_backward(run, context):
    whole, parts = Layers(), Layers()
    if isinstance(context, torch.autocast):
        whole.float(), parts.float()
    tolerance = 1e-2 if isinstance(context, torch.autocast) else 1e-13  # autocast adds up the first layer's in bfloat16
    gradients = WeightGradients(parts)
    for _ in range(2):
        of_input = _backward(lambda x: run(whole, x), context)
        before = _gradients(parts)
        gradients.begin(True)
        torch.testing.assert_close(_backward(lambda x: run(parts, x), context), of_input, rtol=1e-13, atol=1e-13)
        after = _gradients(parts)
        done = {name for name, gradient in after.items() if name not in before or not gradient.equal(before[name])}
        assert done == {"norm.weight", "norm.bias", "vector.weight", "vector.bias", "hooked.weight"}
        gradients.end()()
        gradients.compute()
        torch.testing.assert_close(_gradients(parts), _gradients(whole), rtol=tolerance, atol=tolerance)


@in_turn(("most", "products"), [(50, [5]), (29, [2, 2, 1]), (10, [1] * 5)])
def test_micro_batches_share_a_product_of_bounded_rows(most, products, monkeypatch):
    monkeypatch.setattr(weight_gradients, "PRODUCT_ROWS", most)
    whole, parts = Layers(), Layers()
    gradients, found = WeightGradients(parts), []
    add = weight_gradients._add

    def noting(layer: nn.Linear, rows: list[Any]) -> None:
        if layer is parts.second:
            found.append(len(rows))
        add(layer, rows)

    monkeypatch.setattr(weight_gradients, "_add", noting)
    for _ in range(5):  # of ten rows
        _backward(whole, nullcontext())
        gradients.begin(True)
        _backward(parts, nullcontext())
        gradients.end()()
    assert sum(found) < 5
    gradients.compute()
    assert found == products
    assert gradients.joined == {}
    torch.testing.assert_close(_gradients(parts), _gradients(whole), rtol=1e-13, atol=1e-13)


def test_what_is_not_put_off_is_computed_at_once():
    whole, parts = Layers(), Layers()
    _backward(whole, nullcontext())
    gradients = WeightGradients(parts)
    _backward(parts, nullcontext())  # nobody asked
    torch.testing.assert_close(_gradients(parts), _gradients(whole), rtol=0, atol=0)
    parts.zero_grad()
    gradients.begin(True)

    def forward_only(x: Tensor) -> Tensor:
        out: Tensor = parts(x)
        gradients.begin(False)
        return out

    _backward(forward_only, nullcontext())
    torch.testing.assert_close(_gradients(parts), _gradients(whole), rtol=1e-13, atol=1e-13)
    compiled = Layers()
    gradients = WeightGradients(compiled)
    gradients.begin(True)
    _backward(torch.compile(compiled, backend="aot_eager", fullgraph=True), nullcontext())
    gradients.end()()
    gradients.compute()
    torch.testing.assert_close(_gradients(compiled), _gradients(whole), rtol=1e-13, atol=1e-13)
