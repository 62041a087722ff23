"""The chunked loss against PyTorch's own, and what it holds."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attention.live_bytes import LiveBytes
from tests.cases import in_turn
from wlb.runtime.loss import token_losses


def loss_and_gradient(scores: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = scores.clone().requires_grad_()
    loss = token_losses(leaf, labels, **options).sum()
    return loss, torch.autograd.grad(loss / 7, leaf)[0]


@in_turn("chunk", [1, 5, 12, 13, 4096])
def test_it_is_the_plain_loss(chunk: int) -> None:
    scores = 20 * torch.randn(13, 31, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(13)
    labels[[0, 6, 12]] = -100
    leaf = scores.clone().requires_grad_()
    expected = F.cross_entropy(leaf, labels, reduction="sum")
    loss, grad = loss_and_gradient(scores, labels, chunk=chunk)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, torch.autograd.grad(expected / 7, leaf)[0], rtol=1e-11, atol=1e-14)


def test_half_precision_is_computed_in_float32() -> None:
    scores = torch.randn(40, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(40)
    loss, grad = loss_and_gradient(scores, labels, chunk=16)
    exact, exact_grad = loss_and_gradient(scores.double(), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad, exact_grad.bfloat16(), rtol=2**-7, atol=0)  # rounded once


def test_without_labels_it_is_zero() -> None:
    loss, grad = loss_and_gradient(torch.randn(3, 5), torch.full((3,), -100))
    assert loss == 0
    assert not grad.any()


@in_turn("overwrite", [False, True])
def test_no_wide_copy_of_all_scores_is_held(overwrite: bool) -> None:
    leaf, labels = torch.randn(64, 1000).bfloat16().requires_grad_(), torch.arange(64)
    (expected,) = torch.autograd.grad(token_losses(leaf, labels, chunk=8).sum(), leaf)
    scores = leaf * 1.0
    with LiveBytes() as live:
        (found,) = torch.autograd.grad(token_losses(scores, labels, chunk=8, overwrite=overwrite).sum(), scores)
    assert live.peak < (not overwrite) * scores.nbytes + 4 * 8 * 1000 * 4 + 10_000
    assert torch.equal(found, expected)
    assert torch.equal(scores, found if overwrite else leaf)


def test_a_label_that_is_no_word_fails() -> None:
    for label in (-1, 2):
        with pytest.raises(RuntimeError, match="out of bounds"):
            token_losses(torch.zeros(1, 2), torch.tensor([label]))
