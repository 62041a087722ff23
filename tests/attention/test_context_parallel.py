"""Attention over shards, in real processes, against the dense float64 oracle in one process.

The processes of each group size are started once and go through all cases of that size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.attention.oracle import output_and_gradients, random_inputs
from tests.training.distributed import run_ranks
from wlb.attention import context_parallel_attention
from wlb.sharding import STRATEGIES, make_shard_plan
from wlb.sharding.plan import ShardPlan, split_by_rank

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    name: str
    plan: dict[str, Any]  # as JSON
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    dtype: torch.dtype = torch.float64
    backend: str = "cpu"


MIXES = {
    "one document": [60],
    "single tokens": [1] * 9,
    "shorter than the group": [3, 1, 2, 1],
    "one far longer than a share": [1, 90, 2, 7],
    "many": [1, 17, 40, 3, 1, 1, 29, 64, 5],
}


def _random_plan(lengths: list[int], cp_size: int, owners: int, seed: int) -> ShardPlan:
    """Random cuts dealt at random to the last ``owners`` ranks; the others hold nothing."""
    random = np.random.default_rng(seed)
    rows = []
    for segment, length in enumerate(lengths):
        cuts = np.unique([0, length, *random.integers(0, length + 1, random.integers(0, 8))])
        rows += [(segment, start, stop) for start, stop in pairwise(cuts)]
    table = np.array(rows, dtype=np.int64)
    ranks = cp_size - 1 - random.integers(0, owners, len(table))
    return ShardPlan("random", tuple(lengths), split_by_rank(ranks, table, cp_size))


def _cases(cp_size: int) -> list[Case]:
    cases = []
    for name, lengths in MIXES.items():
        for strategy in STRATEGIES:
            plan = make_shard_plan(lengths, cp_size, strategy).to_json()
            cases.append(Case(f"{strategy}, {name}", plan))
            cases.append(Case(f"{strategy}, {name}, float32", plan, dtype=torch.float32))
        for owners in range(1, cp_size + 1):
            plan = _random_plan(lengths, cp_size, owners, seed=owners).to_json()
            cases.append(Case(f"random over {owners} ranks, {name}", plan))
    plan = make_shard_plan(MIXES["many"], cp_size, "per_document").to_json()
    cases += [Case(f"{heads} heads", plan, heads=heads) for heads in ((4, 4), (4, 1), (6, 3))]
    cases += [Case(f"head_dim {head_dim}", plan, head_dim=head_dim) for head_dim in (64, 128)]
    cases += [Case(f"reference, {dtype}", plan, backend="reference", dtype=dtype) for dtype in TOLERANCES]
    cases.append(Case("auto, bfloat16", plan, backend="auto", dtype=torch.bfloat16))
    return cases


def _local_results(case: Case, inputs: list[Tensor], plan: ShardPlan, rank: int) -> list[Tensor]:
    mine = torch.from_numpy(plan.positions(rank))
    *tensors, grad_out = (tensor[mine].to(case.dtype) for tensor in inputs)
    query, key, value = (tensor.requires_grad_() for tensor in tensors)
    out = context_parallel_attention(query, key, value, plan, None, case.backend)
    assert out.shape == query.shape
    assert out.dtype == case.dtype
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad_out)]


def _errors(cases: list[Case]) -> list[float]:
    """For each case the largest error of this rank's output and gradients, over the largest entry expected."""
    errors = []
    for seed, case in enumerate(cases):
        plan = ShardPlan.from_json(case.plan)
        # Rounded first, so that a narrow type is charged for its arithmetic and not for its inputs.
        inputs = [tensor.to(case.dtype) for tensor in random_inputs(plan.tokens, *case.heads, case.head_dim, seed)]
        expected = output_and_gradients(inputs, plan.segment_lengths)
        mine = torch.from_numpy(plan.positions(dist.get_rank()))
        actual = _local_results(case, inputs, plan, dist.get_rank())
        errors.append(
            max(
                float((got.double() - want[mine]).abs().max() / max(1.0, float(want.abs().max()))) if len(mine) else 0.0
                for got, want in zip(actual, expected, strict=True)
            )
        )
    return errors


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_output_and_gradients_equal_those_of_one_process(cp_size: int) -> None:
    cases = _cases(cp_size)
    by_rank = run_ranks(cp_size, _errors, cases)
    failures = {
        case.name: errors
        for case, *errors in zip(cases, *by_rank, strict=True)
        if not max(errors) <= TOLERANCES[case.dtype]
    }
    assert not failures
