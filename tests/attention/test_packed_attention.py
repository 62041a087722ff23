"""Attention over shards, in real processes, against the dense float64 oracle in one process.

The processes of each group size are started once and go through all cases of that size.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.attention.cuda_on_cpu import cuda_on_cpu
from tests.attention.oracle import output_and_gradients, random_inputs
from tests.attention.plans import random_plan
from tests.training.distributed import run_ranks
from wlb.attention import context_parallel_attention, exchange
from wlb.attention.backends import BACKENDS
from wlb.attention.exchange import KVReexchanges
from wlb.errors import UserError
from wlb.sharding import STRATEGIES, make_shard_plan
from wlb.sharding.plan import ShardPlan

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    name: str
    plan: ShardPlan
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    value_dim: int | None = None
    dtype: torch.dtype = torch.float64
    backends: tuple[str, ...] = ("cuda", "cpu")
    window: int | None = None


MIXES = {
    "one document": [60],
    "single tokens": [1] * 9,
    "shorter than the group": [3, 1, 2, 1],
    "one far longer than a share": [1, 90, 2, 7],
    "many": [1, 17, 40, 3, 1, 1, 29, 64, 5],
}


def _tails_apart(lengths: list[int], cp_size: int) -> ShardPlan:
    """The last rank holds the last token of every segment, rank 0 all others: more travels than is kept."""
    heads = [[segment, 0, length - 1] for segment, length in enumerate(lengths) if length > 1]
    tails = [[segment, length - 1, length] for segment, length in enumerate(lengths)]
    nothing = [np.zeros((0, 3), dtype=np.int64)] * (cp_size - 2)
    return ShardPlan(
        "tails apart", tuple(lengths), (np.array(heads, np.int64).reshape(-1, 3), *nothing, np.array(tails))
    )


def _cases(cp_size: int) -> list[Case]:
    cases = []
    for name, lengths in MIXES.items():
        plans = {strategy: make_shard_plan(lengths, cp_size, strategy) for strategy in STRATEGIES}
        for owners in range(1, cp_size + 1):
            plans[f"random over {owners} ranks"] = random_plan(lengths, cp_size, owners, seed=owners)
        if cp_size > 1:
            plans["tails apart"] = _tails_apart(lengths, cp_size)
        cases += [Case(f"{how}, {name}", plan) for how, plan in plans.items()]
    plan = make_shard_plan(MIXES["many"], cp_size, "per_document")
    cases += [Case(f"{heads} heads", plan, heads=heads) for heads in ((4, 4), (4, 1), (6, 3))]
    cases += [Case(f"head_dim {head_dim}", plan, head_dim=head_dim) for head_dim in (64, 128)]
    cases += [Case(f"values {wide}, window {w}", plan, value_dim=wide, window=w) for wide in (8, 24) for w in (None, 9)]
    cases += [Case(str(dtype), plan, backends=tuple(BACKENDS), dtype=dtype) for dtype in TOLERANCES]
    return cases + _windowed_cases(cp_size)


def _windowed_cases(cp_size: int) -> list[Case]:
    """Windows of one token, within a piece, over several pieces, and longer than every segment."""
    lengths = [1, 17, 150, 3, 1, 29, 64]
    plans = [make_shard_plan(lengths, cp_size, strategy) for strategy in STRATEGIES]
    plans += [random_plan(lengths, cp_size, owners, seed=owners) for owners in range(1, cp_size + 1)]
    cases = [
        Case(f"window {window}, {plan.strategy}", plan, backends=("cuda", other), window=window)
        for plan in plans
        for window, other in ((1, "cpu"), (9, "cpu"), (40, "reference"), (1000, "cpu"))
    ]
    narrow = Case("window 9, bfloat16", plans[0], dtype=torch.bfloat16, window=9)
    return [*cases, narrow]


@cuda_on_cpu()
def _largest_errors(
    case: Case,
    seed: int,
    group: dist.ProcessGroup | None,
    rank: int | None = None,
    members: Sequence[int] | None = None,
) -> dict[str, float]:
    """The largest error of this rank's output and gradients by back end, over the largest entry expected or 1."""
    plan = case.plan
    # Rounded first, so that a narrow type is charged for its arithmetic and not for its inputs.
    inputs = [
        tensor.to(case.dtype) for tensor in random_inputs(plan.tokens, *case.heads, case.head_dim, seed, case.value_dim)
    ]
    expected = output_and_gradients(inputs, plan.segment_lengths, case.window)
    mine = torch.from_numpy(plan.positions(dist.get_rank(group) if rank is None else rank))
    *tensors, grad_out = (tensor[mine] for tensor in inputs)
    query, key, value = (tensor.requires_grad_() for tensor in tensors)
    errors = {}
    for backend in case.backends:
        out = context_parallel_attention(query, key, value, plan, group, backend, window=case.window, members=members)
        assert out.shape == (*query.shape[:2], value.shape[2])
        assert out.dtype == case.dtype
        actual = [out.detach(), *torch.autograd.grad(out, (query, key, value), grad_out)]
        relative = [
            (got.double() - want[mine]).abs().flatten() / want.abs().max().clamp(min=1.0)
            for got, want in zip(actual, expected, strict=True)
        ]
        errors[backend] = float(torch.cat([torch.zeros(1), *relative]).max())  # NaN where any is
    return errors


def _all_errors(cases: list[Case]) -> list[dict[str, float]]:
    return [_largest_errors(case, seed, None) for seed, case in enumerate(cases)]


# Two and four ranks repeat what three prove; test_equivalence trains with both.
@pytest.mark.parametrize("cp_size", [1, 3, *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (2, 4))])
def test_output_and_gradients_equal_those_of_one_process(cp_size: int) -> None:
    cases = _cases(cp_size)
    plans = [case.plan for case in cases]
    assert cp_size == 1 or {plan.keeps_received for plan in plans if plan.kv_traffic.any()} == {True, False}
    by_rank = run_ranks(cp_size, _all_errors, cases)
    failures = {
        case.name: errors
        for case, *errors in zip(cases, *by_rank, strict=True)
        if not all(error <= TOLERANCES[case.dtype] for of_rank in errors for error in of_rank.values())
    }
    assert not failures


def test_a_window_that_holds_every_document_is_full_attention() -> None:
    with mock.patch("wlb.attention.shard_layout._window_layout", side_effect=AssertionError):
        case = Case("", make_shard_plan([5, 1, 9], 1, "per_document"), window=9)
        assert all(error < 1e-10 for error in _largest_errors(case, 0, None, rank=0).values())


def test_what_does_not_fit_the_plan_is_refused() -> None:
    plan = make_shard_plan([5, 1, 9], 1, "per_document")
    query, key, value, _ = random_inputs(14, 4, 2, 8, seed=0)
    with pytest.raises(ValueError, match="the plan gives rank 0 15 tokens and the query has 14"):
        context_parallel_attention(query, key, value, plan, None)
    with pytest.raises(ValueError, match="do not fit together"):
        context_parallel_attention(query, key[:13], value, plan, None)
    with pytest.raises(ValueError, match="window = 0 holds no token"):
        context_parallel_attention(*random_inputs(15, 4, 4, 8, seed=0)[:3], plan, None, window=0)
    with pytest.raises(UserError, match="does not exist"):
        context_parallel_attention(*random_inputs(15, 4, 4, 8, seed=0)[:3], plan, None, "flash")


def _group_of_another_size() -> str:
    plan = make_shard_plan([8], 3, "per_document")
    try:
        context_parallel_attention(*random_inputs(3, 2, 2, 8, seed=0)[:3], plan, None)
    except ValueError as error:
        return str(error)
    return ""


def test_a_group_of_another_size_than_the_plans_is_refused() -> None:
    assert set(run_ranks(2, _group_of_another_size)) == {
        "the plan is for 3 ranks and the group has 2; give the context-parallel group"
    }


def _errors_of_some(cases: list[tuple[tuple[int, ...], Case]]) -> list[dict[str, float]]:
    """Of plans for some ranks of the world, and of one for a group of two, beside which the others run theirs."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = [(members, case) for members, case in cases if rank in members]
    errors = [_largest_errors(case, 0, None, members.index(rank), members) for members, case in mine]
    of_two = Case("two groups", make_shard_plan(MIXES["many"], 2, "per_document"))
    return [*errors, _largest_errors(of_two, 0, groups[rank % 2])]


def test_plans_for_some_ranks_of_a_group_work_beside_each_other() -> None:
    """Each rank runs the plans that name it, in one order, and takes no part in the others."""
    cases = []
    for members in [(0, 2), (1, 3), (0, 1, 3), (2,), (0, 1, 2, 3), (1, 2), (0, 3)]:
        for strategy, window in (("per_document", None), ("per_sequence", 9)):
            plan = make_shard_plan(MIXES["many"], len(members), strategy)
            cases.append((members, Case(str(members), plan, window=window)))
    cases.append(((3, 0), Case("sent again", _tails_apart(MIXES["many"], 2))))
    by_rank = run_ranks(4, _errors_of_some, cases)
    assert all(error < 1e-10 for errors in by_rank for of_case in errors for error in of_case.values())


def _events(plan: ShardPlan, layers: int, *, reexchanges: bool = True) -> tuple[list[str], list[Tensor]]:
    """What this rank does in the backward, in order: messages it starts, parts it attends; and gradients."""
    tensors = random_inputs(int(plan.tokens_per_rank[dist.get_rank()]), 2, 2, 8, seed=0)
    query, key, value = (tensor.requires_grad_() for tensor in tensors[:3])
    events: list[str] = []

    def part(name: str) -> nullcontext[None]:
        events.append(name.removeprefix("attention "))
        return nullcontext()

    def exchanging(*arguments: Any) -> exchange.PendingExchange:
        events.append("send")
        return start(*arguments)

    start = exchange._exchange
    with (
        mock.patch("wlb.attention.packed_attention.record_function", part),
        mock.patch.object(exchange, "_exchange", exchanging),
    ):
        out, together = query, KVReexchanges() if reexchanges else None
        for _ in range(layers):
            out = context_parallel_attention(out, key, value, plan, None, reexchanges=together)
        events.clear()
        grads = torch.autograd.grad(out.sum(), (query, key, value))
    return events, list(grads)


def _events_of_two_layers(shard_plan: ShardPlan) -> tuple[list[str], list[Tensor], list[Tensor]]:
    return *_events(shard_plan, 2), _events(shard_plan, 2, reexchanges=False)[1]


def test_a_layers_keys_are_sent_again_while_the_layer_above_is_computed() -> None:
    layer = ["received", "send", "received", "send"]
    for backward, grads, grads_without in run_ranks(2, _events_of_two_layers, _tails_apart(MIXES["many"], 2)):
        assert backward == ["send", "send", *layer, "send", "send", "own", *layer, "own"]
        assert all(torch.equal(one, other) for one, other in zip(grads, grads_without, strict=True))
