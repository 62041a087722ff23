"""Dealing micro-batches to ranks and ordering them changes no step, only who waits for whom."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.streams import SETTINGS
from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.packing.arrange import Order, arrange
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.schedules.makespan import pipeline_makespan


def step_of(workloads):
    return StepPlan(3, (tuple(MicroBatch((Segment(i, 0, 1),), float(w)) for i, w in enumerate(workloads)),), 70, 5)


def rank_sums(plan):
    return [sum(micro_batch.workload for micro_batch in rank) for rank in plan.ranks]


@st.composite
def steps(draw):
    dp, per_rank = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    workload = st.integers(0, 9) | st.floats(0, 100)
    return dp, step_of(draw(st.lists(workload, min_size=dp * per_rank, max_size=dp * per_rank)))


options = {"assignment": st.sampled_from(["arrival", "balanced"]), "order": st.sampled_from(["arrival", "pipeline"])}


@SETTINGS
@given(steps(), st.fixed_dictionaries(options))
def test_the_same_micro_batches_the_same_number_to_each_rank(dp_and_plan, how):
    dp, plan = dp_and_plan
    arranged = arrange(plan, dp, **how)
    assert Counter(arranged.micro_batches) == Counter(plan.micro_batches)
    assert {len(rank) for rank in arranged.ranks} == {len(plan.micro_batches) // dp}
    assert len(arranged.ranks) == dp
    assert (arranged.step, arranged.delay_token_steps, arranged.longest_delay) == (3, 70, 5)
    assert StepPlan.from_json(arranged.to_json()) == arranged
    if how == {"assignment": "arrival", "order": "arrival"}:
        dealt_in_turn = [rank[turn] for turn in range(len(plan.micro_batches) // dp) for rank in arranged.ranks]
        assert tuple(dealt_in_turn) == plan.micro_batches


@SETTINGS
@given(steps())
def test_balanced_ranks_are_never_worse_than_arrival(dp_and_plan):
    dp, plan = dp_and_plan
    for order in ("arrival", "pipeline"):
        arrival = arrange(plan, dp, assignment="arrival", order=order)
        assert max(rank_sums(arrange(plan, dp, order=order))) <= max(rank_sums(arrival)) * (1 + 1e-12)


def test_where_dealing_heaviest_first_loses_the_arrival_order_is_kept():
    """3, 3, 2, 2, 2 with 0 dealt greedily are 3 + 2 + 2 and 3 + 2 + 0; in turn, as they come, 6 and 6."""
    assert rank_sums(arrange(step_of([3, 2, 3, 2, 0, 2]), 2)) == [6, 6]


@SETTINGS
@given(steps())
def test_pipeline_order_rises_then_falls(dp_and_plan):
    dp, plan = dp_and_plan
    for rank in arrange(plan, dp).ranks:
        workloads = [micro_batch.workload for micro_batch in rank]
        heaviest = workloads.index(max(workloads))
        assert workloads[: heaviest + 1] == sorted(workloads[: heaviest + 1])
        assert workloads[heaviest:] == sorted(workloads[heaviest:], reverse=True)


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_pipeline_order_is_faster_on_average(pp, micro_batches):
    random = np.random.default_rng(pp)
    seconds: dict[Order, list[float]] = {"arrival": [], "pipeline": []}
    for _ in range(40):
        plan = step_of(random.pareto(2, micro_batches) + 0.5)
        for order, taken in seconds.items():
            (rank,) = arrange(plan, 1, assignment="arrival", order=order).ranks
            forward = np.tile([micro_batch.workload / 3 for micro_batch in rank], (pp, 1))
            taken.append(pipeline_makespan("1f1b", forward, 2 * forward))
    assert np.mean(seconds["pipeline"]) < np.mean(seconds["arrival"])


def test_uneven_deals_are_refused():
    for dp in (0, 2, 4):
        with pytest.raises(UserError, match=f"3 micro-batches cannot be dealt evenly to {dp} data-parallel ranks"):
            arrange(step_of([1, 2, 3]), dp)
