"""Runs of queries against runs of other keys, the other half of what a back end computes, and the merging it allows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.limits import examples
from wlb.attention.backends import BACKENDS, cuda, reference
from wlb.attention.runs import Runs

RUNS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=5).map(
    lambda pairs: Runs(tuple(query for query, _ in pairs), tuple(key for _, key in pairs), causal=False)
)
HEADS = st.sampled_from([(4, 4), (4, 2), (3, 1)])


def _inputs(runs: Runs, heads: tuple[int, int], head_dim: int) -> list[Tensor]:
    """Gradient of the output, query, key and value, in float64."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = sum(runs.query_lengths), sum(runs.key_lengths)
    shapes = ((queries, heads[0]), (queries, heads[0]), (keys, heads[1]), (keys, heads[1]))
    return [torch.randn(*shape, head_dim, generator=generator, dtype=torch.float64) for shape in shapes]


def _all_results(name: str, inputs: list[Tensor], runs: Runs) -> list[Tensor]:
    """Output, log-sum-exp and gradients; backward under an output and log-sum-exp over more keys than these."""
    grad_out, query, key, value = inputs
    out, log_sum_exp = BACKENDS[name].forward(query, key, value, runs)
    merged, more = out * 0.5, log_sum_exp + 1.0
    return [out, log_sum_exp, *BACKENDS[name].backward(grad_out, query, key, value, merged, more, runs)]


@settings(max_examples=examples(15), deadline=None)
@given(runs=RUNS, heads=HEADS)
def test_reference_is_softmax_over_the_run(runs: Runs, heads: tuple[int, int]) -> None:
    grad_out, *tensors = _inputs(runs, heads, 8)
    query, key, value = (tensor.requires_grad_() for tensor in tensors)
    out, log_sum_exp = reference.forward(query, key, value, runs)
    grads = reference.backward(grad_out, query, key, value, out.detach(), log_sum_exp.detach(), runs)
    for actual, expected in zip(grads, torch.autograd.grad(out, (query, key, value), grad_out), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(heads[0] // heads[1], dim=1)) / 8**0.5
    first, keys = slice(runs.query_lengths[0]), slice(runs.key_lengths[0])
    torch.testing.assert_close(log_sum_exp[:, first], scores[:, first, keys].logsumexp(-1), rtol=1e-12, atol=1e-12)


@settings(max_examples=examples(15), deadline=None)
@given(runs=RUNS, heads=HEADS)
def test_cpu_equals_the_reference(runs: Runs, heads: tuple[int, int]) -> None:
    inputs = _inputs(runs, heads, 16)
    results = (_all_results(name, inputs, runs) for name in ("cpu", "reference"))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_cuda_calls_the_operators_as_this_pytorch_declares_them(causal: bool) -> None:
    """On tensors without data: names, order and number of arguments, and the shapes that come back."""
    runs = Runs((3, 5), (3, 5), causal) if causal else Runs((3, 5), (4, 9), causal)
    grad_out, query, key, value = (tensor.to("meta", torch.bfloat16) for tensor in _inputs(runs, (4, 4), 16))
    out, log_sum_exp = cuda.forward(query, key, value, runs)
    assert (out.shape, log_sum_exp.shape) == (query.shape, (4, 8))
    grads = cuda.backward(grad_out, query, key, value, out, log_sum_exp, runs)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_cuda_stays_close_to_the_reference(heads: tuple[int, int], causal: bool) -> None:
    lengths = (300, 1, 37, 160)
    runs = Runs(lengths, lengths if causal else (17, 400, 1, 128), causal)
    inputs = [tensor.to("cuda", torch.bfloat16) for tensor in _inputs(runs, heads, 64)]
    exact = [tensor.double() for tensor in inputs]
    for actual, expected in zip(
        _all_results("cuda", inputs, runs), _all_results("reference", exact, runs), strict=True
    ):
        assert float((actual.double() - expected).abs().max() / expected.abs().max()) < 3e-2
