"""Slices in micro-batches of their own, forward in order and backward in reverse, are exactly their documents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.attention.cuda_on_cpu import cuda_on_cpu
from tests.attention.oracle import dense_attention, random_inputs
from tests.training.distributed import run_ranks
from wlb.attention import context_parallel_attention
from wlb.attention.slices import KeptSlices, SliceOf
from wlb.errors import UserError
from wlb.sharding import make_shard_plan

# Documents 0 and 1 go in slices, one shorter than a group and one longer than all before it; the others are whole.
LENGTHS = (49, 38, 11, 1, 20)
CUTS = {0: (0, 20, 23, 49), 1: (0, 5, 38)}
# Which slice of which document, if any, and whole documents.
MICRO_BATCHES: list[tuple[tuple[int, int] | None, list[int]]] = [
    ((0, 0), []),
    ((0, 1), [2]),
    ((1, 0), [3]),
    (None, [4]),
    ((0, 2), []),
    ((1, 1), []),
]
TOLERANCES = {torch.float64: 1e-12, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    heads: tuple[int, int] = (4, 2)
    window: int | None = None
    strategy: str = "per_document"
    value_dim: int = 16
    dtype: torch.dtype = torch.float64
    backend: str = "cpu"


CASES = [Case(window=window, strategy="balanced") for window in (None, 1, 4, 24, 1000)]
CASES += [Case((3, 1), value_dim=24), Case((4, 4), 9, value_dim=8), Case((4, 2), strategy="per_sequence")]
CASES += [Case(window=window, dtype=torch.bfloat16) for window in (None, 9)]
CASES += [replace(case, backend="cuda") for case in CASES]


class Passes:
    """Two layers over the micro-batches, on this rank of ``cp``."""

    def __init__(self, case: Case, cp: int, tensors: Sequence[Tensor]) -> None:
        self.case, self.group, self.cp = case, dist.group.WORLD if cp > 1 else None, cp
        self.rank = dist.get_rank() if cp > 1 else 0
        self.tensors, self.kept = tensors, KeptSlices()

    def forward(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        """This rank's rows of the documents one after another, and what the second layer gives for them."""
        sliced, whole = MICRO_BATCHES[micro_batch]
        begins, slice_of = [0, *accumulate(LENGTHS)], None
        segments = [torch.arange(begins[document], begins[document + 1]) for document in whole]
        if sliced is not None:
            document, number = sliced
            start, stop = list(pairwise(CUTS[document]))[number]
            slice_of = SliceOf(document, 0, start, stop - start)
            segments.insert(0, torch.arange(begins[document] + start, begins[document] + stop))
        layers = iter([None, None]) if slice_of is None else self.kept.layers(slice_of)
        earlier = None if slice_of is None else slice_of.earlier
        plan = make_shard_plan([len(rows) for rows in segments], self.cp, self.case.strategy, earlier=earlier)
        rows = torch.cat(segments)[plan.positions(self.rank)]
        query, key, value = (tensor[rows] for tensor in self.tensors)
        for _ in range(2):
            out = context_parallel_attention(
                *(query, key, value, plan, self.group, self.case.backend),
                window=self.case.window,
                sliced=next(layers),
            )
            query = query + out.mean(-1, keepdim=True)
        return rows, out


def of_whole_documents(case: Case, inputs: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    query, key, value, grad_out = (tensor.detach().double() for tensor in inputs)
    tensors = [tensor.requires_grad_() for tensor in (query, key, value)]
    for _ in range(2):
        out = dense_attention(query, key, value, LENGTHS, case.window)
        query = query + out.mean(-1, keepdim=True)
    return out, torch.autograd.grad(out, tensors, grad_out)


def largest_error(case: Case, cp: int, seed: int) -> float:
    inputs = [x.to(case.dtype) for x in random_inputs(sum(LENGTHS), *case.heads, 16, seed, case.value_dim)]
    expected, expected_grads = of_whole_documents(case, inputs)
    *tensors, grad_out = (tensor.requires_grad_() for tensor in inputs)
    passes = Passes(case, cp, tensors)
    outs = [passes.forward(number) for number in range(len(MICRO_BATCHES))]
    errors = [out.double() - expected[rows] for rows, out in outs]
    for rows, out in reversed(outs):
        out.backward(grad_out[rows].detach())
    assert not any(passes.kept.kept.values())
    for tensor, grad in zip(tensors, expected_grads, strict=True):
        assert tensor.grad is not None
        total = tensor.grad.double()
        if cp > 1:
            dist.all_reduce(total)
        errors.append((total - grad) / grad.abs().max().clamp(min=1.0))
    return float(torch.cat([error.detach().flatten() for error in errors]).abs().max())  # NaN where any is


@cuda_on_cpu()
def largest_errors(cp: int) -> list[float]:
    return [largest_error(case, cp, seed) for seed, case in enumerate(CASES)]


# Two ranks repeat what three prove.
@pytest.mark.parametrize("cp", [1, 3, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_output_and_gradients_are_those_of_whole_documents(cp: int) -> None:
    for errors in run_ranks(cp, largest_errors, cp):
        found = dict(zip(CASES, errors, strict=True))
        assert not {case: error for case, error in found.items() if not error <= TOLERANCES[case.dtype]}


def test_slices_out_of_order_and_without_a_place_to_keep_them_are_refused() -> None:
    query, key, value, _ = (tensor.requires_grad_() for tensor in random_inputs(sum(LENGTHS), 2, 2, 8, seed=0))
    passes = Passes(Case(), 1, [query, key, value])
    with pytest.raises(ValueError, match=r"earlier=20, length=3\) runs forward when 0 tokens before it are kept"):
        passes.forward(1)
    (_, out), _ = passes.forward(0), passes.forward(1)
    with pytest.raises(ValueError, match=r"earlier=0, length=20\) runs backward before a later slice"):
        out.sum().backward()
    plan = make_shard_plan(LENGTHS, 1, "balanced", earlier=0)
    with pytest.raises(
        UserError, match="begins with a slice of a document, and only a pipeline keeps the 0 tokens before it"
    ):
        context_parallel_attention(query, key, value, plan, None)
