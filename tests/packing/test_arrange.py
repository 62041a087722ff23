"""Dealing micro-batches to ranks and ordering them changes no step, only who waits for whom."""

from collections import Counter
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.streams import SETTINGS
from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.packing.arrange import Order, arrange
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.schedules.layout import Layout
from wlb.schedules.operations import SCHEDULES
from wlb.schedules.timing import pipeline_makespan
from wlb.workload import make_workload

WORKLOAD = make_workload("7b")  # in which the forward's share falls with the length of documents


def forward_share(length):
    forward, both = (
        float(WORKLOAD.attention_seconds(length, phase) + WORKLOAD.linear_seconds(length, phase))
        for phase in ("forward", "both")
    )
    return forward / both


def step_of(workloads, lengths=None):
    segments = [Segment(i, 0, length) for i, length in enumerate(lengths or [1] * len(workloads))]
    rank = tuple(
        MicroBatch((segment,), float(w), forward=w * forward_share(segment.length))
        for segment, w in zip(segments, workloads, strict=True)
    )
    return StepPlan(3, (rank,), 70, 5)


def rank_sums(plan):
    return [sum(micro_batch.workload for micro_batch in rank) for rank in plan.ranks]


@st.composite
def steps(draw):
    dp, per_rank = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    workload = st.integers(0, 9) | st.floats(0, 100)
    workloads, lengths = (
        draw(st.lists(values, min_size=dp * per_rank, max_size=dp * per_rank))
        for values in (workload, st.integers(1, 200_000))
    )
    return dp, step_of(workloads, lengths)


@st.composite
def pipelines(draw):
    """Pipelines that take any number of micro-batches."""
    return Layout(schedule=draw(st.sampled_from(SCHEDULES)), pp=draw(st.integers(1, 4)))


def makespans(plan, pipeline):
    workloads = np.array([[micro_batch.workload for micro_batch in rank] for rank in plan.ranks])
    forwards = np.array([[micro_batch.forward for micro_batch in rank] for rank in plan.ranks])
    forward, backward = (
        np.repeat((part / pipeline.stages)[:, None], pipeline.stages, axis=1)
        for part in (forwards, workloads - forwards)
    )
    return pipeline_makespan(pipeline.schedule, forward, backward, pipeline.virtual_pp)


options = {
    "assignment": st.sampled_from(["arrival", "balanced"]),
    "order": st.sampled_from(["arrival", "pipeline", "fastest"]),
}


@SETTINGS
@given(steps(), st.fixed_dictionaries(options), pipelines())
def test_the_same_micro_batches_the_same_number_to_each_rank(dp_and_plan, how, pipeline):
    dp, plan = dp_and_plan
    arranged = arrange(plan, dp, **how, pipeline=pipeline)
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
            taken.append(float(pipeline_makespan("1f1b", forward, 2 * forward)))
    assert np.mean(seconds["pipeline"]) < np.mean(seconds["arrival"])


@SETTINGS
@given(steps(), pipelines())
def test_no_rank_is_slower_in_makespan_order_than_by_any_rule(dp_and_plan, pipeline):
    dp, plan = dp_and_plan
    # Equal workloads may differ in their forwards, and then a rule is as many orders as there are ways to sort them.
    different = [
        replace(m, workload=m.workload * (1 + 1e-6 * i), forward=m.forward * (1 + 1e-6 * i))
        for i, m in enumerate(plan.micro_batches)
    ]
    plan = replace(plan, ranks=(tuple(different),))
    searched = arrange(plan, dp, order="fastest", pipeline=pipeline)
    assert arrange(plan, dp, order="fastest", pipeline=pipeline) == searched
    rules = [arrange(plan, dp, order=order) for order in ("arrival", "pipeline")]
    for descending in (False, True):
        ranks = (sorted(rank, key=lambda m: m.workload, reverse=descending) for rank in rules[0].ranks)
        rules.append(replace(plan, ranks=tuple(tuple(rank) for rank in ranks)))
    for rule in rules:
        assert np.all(makespans(searched, pipeline) <= makespans(rule, pipeline) * 1.0011)


@SETTINGS
@given(st.lists(st.integers(1, 20), min_size=4, max_size=4), pipelines())
def test_four_micro_batches_run_in_the_best_of_all_orders(workloads, pipeline):
    plan = step_of(workloads, [10_000, 20_000, 100_000, 50])
    searched = arrange(plan, 1, order="fastest", pipeline=pipeline)
    best = min(makespans(replace(plan, ranks=(order,)), pipeline)[0] for order in permutations(plan.micro_batches))
    assert makespans(searched, pipeline)[0] <= best * 1.0011


def test_the_search_comes_close_to_the_best_place_of_a_heavy_pair():
    """Two heavy micro-batches among light ones: every pair of places is tried here, the search tries few."""
    pipeline = Layout(pp=4)
    light, heavy = [0.87] * 14, [2.3, 2.2]
    searched = arrange(step_of(light + heavy), 1, order="fastest", pipeline=pipeline)
    every_pair = []
    for first, second in permutations(range(16), 2):
        order = light.copy()
        for place, workload in sorted(zip((first, second), heavy, strict=True)):
            order.insert(place, workload)
        every_pair.append(makespans(step_of(order), pipeline)[0])
    assert makespans(searched, pipeline)[0] <= 1.001 * min(every_pair) < 0.98 * every_pair[0]


def test_of_many_micro_batches_a_sample_of_orders_is_searched():
    pipeline, plan = Layout(pp=8), step_of([0.9] * 509 + [9, 8, 7])
    searched = arrange(plan, 1, order="fastest", pipeline=pipeline)
    assert makespans(searched, pipeline)[0] < makespans(arrange(plan, 1), pipeline)[0]


def test_even_micro_batches_keep_the_order_in_which_they_were_packed():
    plan = step_of([1, 1.0005, 1.0009, 1.0001])
    assert arrange(plan, 1, assignment="arrival", order="fastest", pipeline=Layout(pp=4)) == plan


def test_without_a_pipeline_ranks_run_micro_batches_that_cost_alike_at_the_same_time():
    arranged = arrange(step_of([3, 1, 2, 5, 4, 6]), 2, order="fastest", pipeline=Layout(pp=1))
    workloads = [[micro_batch.workload for micro_batch in rank] for rank in arranged.ranks]
    assert sorted(map(sorted, workloads)) == sorted(workloads)
    assert sum(max(at_once) for at_once in zip(*workloads, strict=True)) == 2 + 4 + 6


def test_equal_workloads_of_unequal_forwards_are_ordered_too():
    pipeline, plan = Layout(pp=4), step_of([1] * 8, [200_000, 1] * 4)
    searched = arrange(plan, 1, assignment="arrival", order="fastest", pipeline=pipeline)
    assert makespans(searched, pipeline)[0] < makespans(plan, pipeline)[0]


def test_makespan_order_without_a_pipeline_is_refused():
    with pytest.raises(UserError, match="give pipeline"):
        arrange(step_of([1, 2]), 1, order="fastest")


def test_uneven_deals_are_refused():
    for dp in (0, 2, 4):
        with pytest.raises(UserError, match=f"3 micro-batches cannot be dealt evenly to {dp} data-parallel ranks"):
            arrange(step_of([1, 2, 3]), dp)
