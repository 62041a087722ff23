"""The layer alone: every token goes through its experts, by either kernel, and padding counts nowhere.

Losses of routers and biases are compared with their formulas, because other tests share the layer with their oracle.
"""

from dataclasses import replace
from typing import Literal, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wlb.models.experts import MixtureOfExperts, Routing, end_step
from wlb.models.transformer import FeedForward
from wlb.workload import ModelShape
from wlb.workload.shapes import Experts

HIDDEN, SHAPE = 8, Experts(6, 2, 12, shared_hidden=4)
Router = Literal["softmax", "sigmoid"]
X = torch.randn(20, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def mixture(router: str = "softmax") -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(HIDDEN, SHAPE, router, 1, FeedForward(HIDDEN, SHAPE.shared_hidden)).double()
    layer.reset_state()
    for weight in layer.experts.parameters():
        torch.nn.init.normal_(weight)
    return layer


def by_token(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """One token at a time, as the papers write it."""
    rows = []
    w1, w2, w3 = (
        weight.unflatten(0, (SHAPE.count, -1)) for weight in (layer.experts.w1, layer.experts.w2, layer.experts.w3)
    )
    for row in x:
        logits = layer.router(row)
        scores = logits.sigmoid() if layer.scores == "sigmoid" else logits.softmax(-1)
        chosen = (scores + layer.bias).topk(SHAPE.active).indices
        gates = scores[chosen] / scores[chosen].sum()
        of_experts = [
            gate * (w2[i] @ (F.silu(w1[i] @ row) * (w3[i] @ row))) for gate, i in zip(gates, chosen, strict=True)
        ]
        assert layer.shared is not None
        rows.append(sum(of_experts, layer.shared(row)))
    return torch.stack(rows)


@pytest.mark.parametrize("router", get_args(Router))
def test_every_token_goes_through_its_experts(router: Router) -> None:
    layer = mixture(router)
    layer.bias[2] += 0.3
    expected, x = by_token(layer, X), X.clone().requires_grad_()
    found = layer(x)
    assert torch.allclose(found, expected, rtol=1e-12)
    weights = [x, *layer.parameters()]
    exact = torch.autograd.grad(by_token(layer, x).square().sum(), weights)
    for one, other in zip(torch.autograd.grad(found.square().sum(), weights), exact, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("counts", [[3, 0, 7, 10, 0, 0], [0, 0, 0, 0, 0, 0]])
def test_one_kernel_for_all_experts_computes_what_a_loop_does(counts: list[int]) -> None:
    experts, tokens = mixture().experts, sum(counts)
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64)
    exact = experts(x, torch.tensor(counts))
    gradients = torch.autograd.grad(exact.square().sum(), [*experts.parameters()])
    experts = experts.float()
    found = experts(x.float(), torch.tensor(counts))
    assert torch.allclose(found.double(), exact, rtol=1e-4, atol=1e-4)
    for one, other in zip(torch.autograd.grad(found.square().sum(), [*experts.parameters()]), gradients, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-3, atol=1e-2)


def test_padding_has_no_losses_and_counts_nowhere() -> None:
    layer = mixture()
    whole, padded = Routing(13, 0.5, 0.2), Routing(13, 0.5, 0.2)
    gradients = []
    for routing, x in ((whole, X[:13]), (padded, X)):
        out = layer(x, routing)
        gradients.append(torch.autograd.grad(out[:13].sum(), [layer.router.weight])[0])
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-12)
    assert torch.equal(whole.counts[1], padded.counts[1])
    assert int(whole.counts[1].sum()) == 13 * SHAPE.active
    layer.tp_rank = 1  # the second half of 13 tokens and 7 of padding
    part = Routing(13)
    layer(X[10:], part)
    assert int(part.counts[1].sum()) == 3 * SHAPE.active


@pytest.mark.parametrize("router", get_args(Router))
def test_routers_add_the_gradients_of_their_losses(router: Router) -> None:
    layer = mixture(router)
    layer.shares.copy_(torch.arange(SHAPE.count) / 15)
    weight, expected = layer.router.weight, X.new_zeros(())
    for logits in layer.router(X):
        scores = logits.sigmoid() if router == "sigmoid" else logits.softmax(-1)
        expected = expected + 0.5 * SHAPE.count * (scores / scores.sum() * layer.shares).sum()
        expected = expected + 0.2 * logits.exp().sum().log() ** 2
    with_losses, without = (
        torch.autograd.grad(layer(X, routing).sum(), [weight])[0] for routing in (Routing(len(X), 0.5, 0.2), None)
    )
    assert torch.allclose(with_losses - without, torch.autograd.grad(expected, [weight])[0], rtol=1e-10)


@pytest.mark.parametrize("router", get_args(Router))
def test_the_end_of_a_step_moves_biases_against_the_load_and_keeps_shares(router: Router) -> None:
    layer, experts = mixture(router), replace(SHAPE, dense_layers=1)
    shape = ModelShape(
        hidden=HIDDEN, layers=3, heads=2, kv_heads=1, head_dim=4, ffn_hidden=8, vocab_size=5, experts=experts
    )
    routed = [Routing(8, counts={1: torch.tensor(counts)}) for counts in ([9, 1, 0, 0, 5, 1], [0, 2, 0, 0, 0, 0])]
    counts = end_step({1: layer}, routed, shape, torch.device("cpu"), 0.1)
    assert counts.tolist() == [[9, 3, 0, 0, 5, 1], [0] * 6]
    assert torch.allclose(layer.shares, counts[0].double() / 18, rtol=1e-12)
    moved = [-0.1, 0.0, 0.1, 0.1, -0.1, 0.1]  # 3 is the mean
    assert layer.bias.tolist() == pytest.approx(moved if router == "sigmoid" else [0.0] * 6)
