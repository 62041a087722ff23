"""Lists of micro-batches that ranks run on their own: no order of their exchanges and reductions can hang.

Every rank's attention really runs, forward and backward, with a process group that has no other ranks. A collective
after each layer of the backward of its last micro-batch stands for FSDP's reduction.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.limits import examples
from tests.training.documents import RandomDocuments
from tests.training.order.calls import Call, CallLog
from tests.training.order.fake_rank import Routes, StepWatcher, fake_process_group
from tests.training.order.order import OrderError, check_order
from wlb.documents.segments import Segment
from wlb.models.experts import GroupedExperts, MixtureOfExperts, Routing
from wlb.packing.plan import MicroBatch, StageRanks, StepPlan
from wlb.runtime.batch import Batch, RankSlice
from wlb.runtime.reading import make_batch
from wlb.schedules.layout import Layout
from wlb.workload.shapes import Experts

LAYERS = 2
STORE = RandomDocuments(np.array([1, 40, 7, 23, 3, 64, 12, 9]), vocab_size=5)
Batches = Sequence[Batch]


def plan_of(*groups: tuple[tuple[int, ...], int]) -> StepPlan:
    """One of micro-batches of one document each: their ranks, and its number."""
    parts = [
        MicroBatch((Segment(document, 0, int(STORE.lengths[document])),), 1.0, ranks) for ranks, document in groups
    ]
    return StepPlan(0, (tuple(parts),))


def calls_of(
    plan: StepPlan, ranks: int, run: Callable[[int, Batches], Batches] | None = None, ep: int = 1, early: int = -1
) -> dict[int, list[Call]]:
    """What each of ``ranks`` calls; ``run`` gives those of a rank's batches that it runs, in their order.

    Groups of ``ep`` ranks share experts. The rank ``early`` reduces before its last batch.
    """
    calls, read = {}, partial(make_batch, store=STORE)
    shares = [RankSlice(0, rank, Layout(cp=ranks, ep=ep)) for rank in range(ranks)]
    for rank in range(ranks):
        planned: Batches = shares[rank].batches(plan, read)
        batches = run(rank, planned) if run else planned
        routings = [Routing(len(batch.tokens)) for batch in planned]
        log, routes, group = CallLog(), Routes(partial(list, routings)), rank // ep
        routes.begin(plan, shares[group * ep : (group + 1) * ep], read)
        with fake_process_group(rank, ranks), log.listening(), StepWatcher(log), routes.followed():
            experts = None if ep == 1 else _experts(range(group * ep, (group + 1) * ep))
            _reduce(torch.zeros(1))  # as all gather weights
            for index, batch in enumerate(batches):
                routing = next(one for one, of_plan in zip(routings, planned, strict=True) if of_plan is batch)
                last = len(batches) - 1 - (rank == early)
                _run(batch, experts and partial(experts, routing=routing), reduces=index == last)
        calls[rank] = log.calls
    return calls


def _experts(ranks: Sequence[int]) -> MixtureOfExperts:
    """A layer with one expert on each of ``ranks``."""
    layer = MixtureOfExperts(16, Experts(len(ranks), active=len(ranks), ffn_hidden=8), "softmax", 0, None)
    layer.experts = GroupedExperts(16, Experts(1, active=1, ffn_hidden=8))
    layer.group = dist.new_group(ranks, use_local_synchronization=True)
    return layer


def _run(batch: Batch, experts: Callable[[Tensor], Tensor] | None, *, reduces: bool) -> None:
    assert batch.attention is not None
    attend = batch.attention.of_one_stage()
    x = torch.zeros(len(batch.tokens), 2, 8, requires_grad=True)
    layers = [x]
    for _ in range(LAYERS):
        out = attend(layers[-1], layers[-1], layers[-1])
        layers.append(out if experts is None else experts(out.flatten(1)).view_as(out))
    if reduces:
        for layer in layers[:-1]:
            layer.register_hook(_reduce)
    layers[-1].sum().backward()


def _reduce(gradient: Tensor) -> None:
    dist.all_reduce(torch.zeros(1))


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, int, int]:
    """A plan, the number of ranks, and how many of them share experts."""
    together = draw(st.sampled_from([1, 2]))
    groups = draw(st.integers(2, 5 if together == 1 else 3))
    members = st.sets(st.integers(0, groups - 1), min_size=1).map(lambda members: tuple(sorted(members)))
    ranks = members.map(StageRanks(groups, together=together).of_groups)
    document = st.integers(0, len(STORE.lengths) - 1)
    return plan_of(*draw(st.lists(st.tuples(ranks, document), min_size=1, max_size=8))), groups * together, together


@settings(max_examples=examples(15), deadline=None)
@given(plans())
def test_every_call_of_any_lists_can_be_made(drawn: tuple[StepPlan, int, int]) -> None:
    plan, ranks, together = drawn
    calls = calls_of(plan, ranks, ep=together)
    reductions = 1 + LAYERS
    assert all(sum(call.operation == "all_reduce" for call in of_rank) == reductions for of_rank in calls.values())
    assert check_order(calls)


def test_ranks_that_keep_to_orders_of_their_own_wait_for_each_other() -> None:
    circle = plan_of(((0, 1), 1), ((1, 2), 3), ((0, 2), 5))
    assert check_order(calls_of(circle, 3))

    def turned(rank: int, batches: Batches) -> Batches:
        return [*batches[:2][::-1], *batches[2:]] if rank == 0 else batches

    with pytest.raises(OrderError, match=r"rank \d at .* waits for rank \d, .* waits for"):
        check_order(calls_of(circle, 3, turned))


def test_a_rank_that_reduces_too_early_waits_for_one_that_waits_for_it() -> None:
    plan = plan_of(((0, 1), 1), ((1, 2), 3))
    assert check_order(calls_of(plan, 3))

    def without_the_empty_one(rank: int, batches: Batches) -> Batches:
        return [batch for batch in batches if len(batch.tokens) > 1]

    with pytest.raises(OrderError, match="waits for"):
        check_order(calls_of(plan, 3, without_the_empty_one))


def test_ranks_that_share_experts_and_run_other_rounds_wait_for_each_other() -> None:
    plan = plan_of(((0, 1), 1), ((2, 3), 3), ((0, 1, 2, 3), 5), ((0, 1), 7))
    assert check_order(calls_of(plan, 4, ep=2))

    def only(changed: Callable[[Batches], Batches]) -> Callable[[int, Batches], Batches]:
        return lambda rank, batches: changed(batches) if rank == 0 else batches

    for changed in (lambda batches: batches[:-1], lambda batches: batches[1:], lambda batches: batches[::-1]):
        with pytest.raises(OrderError, match="rank 0"):
            check_order(calls_of(plan, 4, only(changed), ep=2))
    with pytest.raises(OrderError, match="waits for"):
        check_order(calls_of(plan, 4, ep=2, early=0))


def test_a_group_that_shares_experts_may_not_be_split() -> None:
    plan = plan_of(((0, 1), 1), ((1, 2, 3), 5), ((1, 2, 3), 7))
    assert check_order(calls_of(plan, 4))
    with pytest.raises(OrderError, match=r"waits for|which expects"):
        check_order(calls_of(plan, 4, ep=2))
