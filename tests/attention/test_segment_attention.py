"""Every back end against the reference, and the reference against a formulation that shares nothing with it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention.cuda_on_cpu import cuda_on_cpu
from tests.attention.oracle import dense_attention, random_inputs
from tests.cases import in_turn
from tests.limits import examples
from wlb.attention import segment_attention
from wlb.attention.backends import BACKENDS, pick_backend
from wlb.errors import UserError

SEGMENT_LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple)
HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 3), (4, 1)])


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(device, dtype).requires_grad_()


def _attend(
    backend: str, lengths: tuple[int, ...], heads: tuple[int, int], dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """Output and the three gradients, in float64 on the CPU, for random inputs that depend on the sizes alone."""
    tokens, (query_heads, kv_heads), head_dim = sum(lengths), heads, 16
    query = _random((tokens, query_heads, head_dim), dtype, 0, device)
    key = _random((tokens, kv_heads, head_dim), dtype, 1, device)
    value = _random((tokens, kv_heads, head_dim), dtype, 2, device)
    out = segment_attention(query, key, value, lengths, backend)
    out.backward(_random(tuple(out.shape), dtype, 3, device).detach())
    assert out.shape == query.shape
    assert out.dtype == dtype
    gradients = [tensor.grad for tensor in (query, key, value)]
    return [tensor.detach().double().cpu() for tensor in (out, *gradients) if tensor is not None]


def _largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    errors = [(a - e).abs().max() / e.abs().max().clamp(min=1e-300) for a, e in zip(actual, expected, strict=True)]
    return float(torch.stack(errors).max())  # NaN where any is


@settings(max_examples=examples(15), deadline=None)
@given(lengths=SEGMENT_LENGTHS, heads=HEADS)
def test_reference_is_dense_attention_under_a_block_diagonal_causal_mask(
    lengths: tuple[int, ...], heads: tuple[int, int]
) -> None:
    for value_dim in (8, 5, 12):  # as wide as keys, as in latent attention, and wider
        query, key, value, _ = random_inputs(sum(lengths), *heads, head_dim=8, seed=0, value_dim=value_dim)
        dense = dense_attention(query, key, value, lengths)
        actual = segment_attention(query, key, value, lengths, "reference")
        torch.testing.assert_close(actual, dense, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@settings(max_examples=examples(15), deadline=None)
@given(lengths=SEGMENT_LENGTHS, heads=HEADS)
@cuda_on_cpu()
def test_every_back_end_equals_the_reference(backend: str, lengths: tuple[int, ...], heads: tuple[int, int]) -> None:
    expected = _attend("reference", lengths, heads, torch.float64)
    # A segment of one token has query and key gradients that are exactly zero but for rounding.
    for actual, exact in zip(_attend(backend, lengths, heads, torch.float64), expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@cuda_on_cpu()
def test_lower_precision_stays_close_to_float64(backend: str) -> None:
    lengths, heads = (300, 1, 37, 160), (4, 2)
    exact = _attend("reference", lengths, heads, torch.float64)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        assert _largest_error(_attend(backend, lengths, heads, dtype), exact) < tolerance


@pytest.mark.parametrize("backend", BACKENDS)
@cuda_on_cpu()
def test_gradients_equal_finite_differences(backend: str) -> None:
    inputs = [_random((7, heads, 8), torch.float64, seed) for seed, heads in enumerate((4, 2, 2))]
    # The gradient that a sum hands on is not contiguous.
    assert torch.autograd.gradcheck(lambda q, k, v: segment_attention(q, k, v, (3, 1, 3), backend).sum(-1), inputs)


def test_auto_prefers_the_fastest_that_supports_the_tensors() -> None:
    assert pick_backend(torch.empty(1, 1, 8)) is BACKENDS["cpu"]
    assert pick_backend(torch.empty(1, 1, 8, dtype=torch.float16)) is BACKENDS["reference"]


def test_a_back_end_that_cannot_run_says_why() -> None:
    with pytest.raises(UserError, match=r"'cpu' cannot be used: torch\.float16 is not one of"):
        pick_backend(torch.empty(1, 1, 8, dtype=torch.float16), "cpu")
    with pytest.raises(UserError, match=r"'cuda' cannot be used: (there is no|the tensors are on cpu)"):
        pick_backend(torch.empty(1, 1, 8), "cuda")
    with pytest.raises(UserError, match=r"'flash' does not exist; choose auto, cuda, cpu, reference"):
        pick_backend(torch.empty(1, 1, 8), "flash")


@in_turn(
    ("key_shape", "lengths"),
    [((9, 2, 8), (10,)), ((10, 3, 8), (10,)), ((10, 2, 4), (10,)), ((10, 2, 8), (4, 5)), ((10, 2, 8), (10, 0))],
)
def test_what_does_not_fit_together_is_refused(key_shape: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    key = torch.empty(key_shape)
    with pytest.raises(ValueError, match=r"fit together|add up"):
        segment_attention(torch.empty(10, 4, 8), key, key, lengths)


def test_batched_tensors_are_refused_by_name() -> None:
    batched = torch.zeros(2, 8, 4, 16)
    with pytest.raises(ValueError, match=r"query has shape \(2, 8, 4, 16\).*query.flatten"):
        segment_attention(batched, batched, batched, [8, 8])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_cuda_stays_close_to_float64(heads: tuple[int, int]) -> None:
    lengths = (300, 1, 37, 160)
    assert pick_backend(torch.empty(1, 1, 16, dtype=torch.bfloat16, device="cuda")) is BACKENDS["cuda"]
    actual = _attend("cuda", lengths, heads, torch.bfloat16, device="cuda")
    assert _largest_error(actual, _attend("reference", lengths, heads, torch.float64)) < 3e-2
