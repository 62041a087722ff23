"""All that a back end computes: own keys, received keys, keys in a window, and the merging that it allows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention.cuda_on_cpu import cuda_on_cpu
from tests.limits import examples
from wlb.attention.backends import BACKENDS
from wlb.attention.variable_length import VariableLengthBatch

PAIRS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=5)


@st.composite
def batches(draw: st.DrawFn) -> VariableLengthBatch:
    queries, others = zip(*draw(PAIRS), strict=True)
    kind = draw(st.sampled_from(["own", "received", "window"]))
    if kind == "window":
        keys = tuple(map(sum, zip(queries, others, strict=True)))
        return VariableLengthBatch(queries, keys, causal=True, window=draw(st.integers(1, 60)))
    return VariableLengthBatch(queries, queries if kind == "own" else others, causal=kind == "own")


HEADS = st.sampled_from([(4, 4), (4, 2), (3, 1)])


def _inputs(batch: VariableLengthBatch, heads: tuple[int, int], head_dim: int) -> list[Tensor]:
    """Gradient of the output, query, key and value, in float64."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = sum(batch.query_lengths), sum(batch.key_lengths)
    shapes = ((queries, heads[0]), (queries, heads[0]), (keys, heads[1]), (keys, heads[1]))
    return [torch.randn(*shape, head_dim, generator=generator, dtype=torch.float64) for shape in shapes]


def _all_results(name: str, inputs: list[Tensor], batch: VariableLengthBatch) -> list[Tensor]:
    """Output, log-sum-exp and gradients; backward under an output and log-sum-exp over more keys than these."""
    grad_out, query, key, value = inputs
    out, log_sum_exp = BACKENDS[name].forward(query, key, value, batch)
    merged, more = out * 0.5, log_sum_exp + 1.0
    return [out, log_sum_exp, *BACKENDS[name].backward(grad_out, query, key, value, merged, more, batch)]


@pytest.mark.parametrize("name", ["cpu", "cuda"])
@settings(max_examples=examples(15), deadline=None)
@given(batch=batches(), heads=HEADS)
@cuda_on_cpu()
def test_every_back_end_equals_the_reference(name: str, batch: VariableLengthBatch, heads: tuple[int, int]) -> None:
    inputs = _inputs(batch, heads, 16)
    results = (_all_results(one, inputs, batch) for one in (name, "reference"))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize(
    "batch",
    [
        VariableLengthBatch.of_segments((300, 1, 37, 160)),
        VariableLengthBatch((300, 1, 37, 160), (17, 400, 1, 128), causal=False),
        VariableLengthBatch((300, 1, 37, 160), (340, 50, 37, 180), causal=True, window=30),
    ],
    ids=["own", "received", "window"],
)
def test_cuda_stays_close_to_the_reference(heads: tuple[int, int], batch: VariableLengthBatch) -> None:
    inputs = [tensor.to("cuda", torch.bfloat16) for tensor in _inputs(batch, heads, 64)]
    exact = [tensor.double() for tensor in inputs]
    for actual, expected in zip(
        _all_results("cuda", inputs, batch), _all_results("reference", exact, batch), strict=True
    ):
        assert float((actual.double() - expected).abs().max() / expected.abs().max()) < 3e-2
