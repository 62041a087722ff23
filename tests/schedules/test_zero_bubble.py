"""The pipeline simulation against torch's own schedules, executed action by action with a clock for every rank.

Also the zero-bubble orders against torch's, and equal times against closed forms.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.errors import UserError
from wlb.schedules.operations import Operation, Part, rank_operations, stages_of_rank
from wlb.schedules.timing import pipeline_makespan, pipeline_times

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

CLASSES = {
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": schedules.ScheduleZBVZeroBubble,
}


KINDS = {
    schedules.FORWARD: "F",
    schedules.FULL_BACKWARD: "B",
    schedules.BACKWARD_INPUT: "I",
    schedules.BACKWARD_WEIGHT: "W",
}


def torch_actions(name: str, pp: int, micro_batches: int, virtual_stages: int) -> list[list[Any]]:
    """Every rank's actions as torch makes them, without the slots in which it does nothing."""
    cls = CLASSES[name]
    rounds = max(1, micro_batches // pp)
    schedule = SimpleNamespace(
        n_local_stages=virtual_stages,
        pp_group_size=pp,
        num_stages=pp * virtual_stages,
        microbatches_per_round=micro_batches // rounds,
        _n_microbatches=micro_batches,
    )
    schedule.pipeline_order = {rank: cls._calculate_single_rank_operations(schedule, rank) for rank in range(pp)}
    if name == "interleaved_zero_bubble":
        schedule.pipeline_order = cls._add_bubbles_to_actions(schedule, pp * virtual_stages)
    return [[action for action in schedule.pipeline_order[rank] if action] for rank in range(pp)]


def as_operation(action: Any) -> Operation:
    kinds: dict[Any, tuple[bool, Part]] = {
        schedules.FORWARD: (False, "whole"),
        schedules.FULL_BACKWARD: (True, "whole"),
        schedules.BACKWARD_INPUT: (True, "input"),
        schedules.BACKWARD_WEIGHT: (True, "weight"),
    }
    return Operation(action.stage_index, action.microbatch_index, *kinds[action.computation_type])


def executed(actions: list[list[Any]], seconds: dict[str, np.ndarray], transfer: np.ndarray) -> float:
    """When the last rank is done if every rank runs its actions in turn, each as soon as its input has arrived."""
    stages = len(seconds["F"])
    home = {action.stage_index: rank for rank, mine in enumerate(actions) for action in mine}
    done: dict[tuple[int, str, int], float] = {}
    clocks = [0.0] * len(actions)
    waiting = [list(mine) for mine in actions]

    def input_of(action: Any, kind: str) -> tuple[int, str, int] | None:
        stage, micro_batch = action.stage_index, action.microbatch_index
        if kind == "F":
            return (stage - 1, "F", micro_batch) if stage else None
        if kind == "W":
            return (stage, "I", micro_batch)
        return (stage, "F", micro_batch) if stage == stages - 1 else (stage + 1, kind, micro_batch)

    while any(waiting):
        moved = False
        for rank, mine in enumerate(waiting):
            while mine:
                action = mine[0]
                kind = KINDS[action.computation_type]
                needed = input_of(action, kind)
                if needed is not None and needed not in done:
                    break
                arrival = 0.0
                if needed is not None:
                    arrival = done[needed] + (transfer[action.microbatch_index] if home[needed[0]] != rank else 0.0)
                clocks[rank] = max(clocks[rank], arrival) + seconds[kind][action.stage_index, action.microbatch_index]
                done[action.stage_index, kind, action.microbatch_index] = clocks[rank]
                mine.pop(0)
                moved = True
        assert moved, "torch's schedule deadlocks"
    return max(clocks)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int]:
    name = draw(st.sampled_from(sorted(CLASSES)))
    pp = draw(st.integers(1, 5))
    rounds = draw(st.integers(1, 3))
    extra = draw(st.integers(0, 1)) * rounds if name != "zbv_zero_bubble" and pp > 1 and rounds < pp else 0
    micro_batches = draw(st.integers(1, 12)) if name == "zbv_zero_bubble" else pp * rounds + extra
    several = name == "interleaved_1f1b"  # of one stage it is 1F1B
    return name, pp, micro_batches, 2 if name == "zbv_zero_bubble" else draw(st.integers(1 + several, 3))


@settings(deadline=None)
@given(pipelines())
def test_ranks_run_in_the_order_of_torch(pipeline):
    name, pp, micro_batches, virtual_stages = pipeline
    expected = [[as_operation(action) for action in mine] for mine in torch_actions(*pipeline)]
    operations = rank_operations(name, pp, micro_batches, virtual_stages)
    assert [list(mine) for mine in operations] == expected
    for rank, mine in enumerate(operations):
        assert {operation.stage for operation in mine} == set(stages_of_rank(name, rank, pp, virtual_stages))


@settings(deadline=None)
@given(pipelines(), st.integers(0, 2**32))
def test_makespan_is_that_of_torchs_actions(pipeline, seed):
    name, pp, micro_batches, virtual_stages = pipeline
    rng = np.random.default_rng(seed)
    forward, inputs, weight = rng.integers(0, 9, (3, pp * virtual_stages, micro_batches)).astype(float)
    transfer = rng.integers(0, 4, micro_batches).astype(float)
    backward = inputs + weight
    seconds = {"F": forward, "B": backward, "I": inputs, "W": weight}
    expected = executed(torch_actions(*pipeline), seconds, transfer)
    makespan = pipeline_makespan(name, forward, backward, virtual_stages, weight=weight, transfer=transfer)
    assert makespan == expected


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 3), (4, 7), (4, 16), (8, 24)])
def test_zbv_has_no_bubble_but_the_first_forwards_for_equal_times(pp, micro_batches):
    """F = B = W: the paper's condition (arXiv 2401.10241, section 6). The last rank starts pp - 1 forwards late."""
    times = np.ones((2 * pp, micro_batches))
    makespan = pipeline_makespan("zbv_zero_bubble", times, 2 * times, 2, weight=times)
    assert makespan == 6 * micro_batches + pp - 1


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (8, 16)])
def test_zero_bubble_takes_a_third_of_the_bubble_of_1f1b(pp, micro_batches):
    """ZB-H1 against 1F1B for F = B = W: (pp - 1) (F + B - W) instead of (pp - 1) (F + B + W), its Table 2."""
    times = np.ones((pp, micro_batches))
    makespan = pipeline_makespan("interleaved_zero_bubble", times, 2 * times, weight=times)
    assert makespan == 3 * micro_batches + pp - 1
    assert pipeline_makespan("1f1b", times, 2 * times) == 3 * (micro_batches + pp - 1)


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 2), (4, 8), (8, 8)])
def test_transfers_lengthen_the_way_through_an_empty_pipeline(pp, micro_batches):
    """1F1B whose forwards and backwards take as long: every hop of the first forward and the last backward is paid."""
    times = np.ones((pp, 1))
    assert pipeline_makespan("1f1b", times, times, transfer=0.5) == 2 * pp + 2 * (pp - 1) * 0.5
    many = np.ones((pp, micro_batches))
    with_transfers = pipeline_makespan("1f1b", many, many, transfer=0.5)
    assert with_transfers >= pipeline_makespan("1f1b", many, many) + 2 * (pp - 1) * 0.5


def test_times_of_operations_fit_together():
    rng = np.random.default_rng(0)
    forward, backward = rng.random((2, 3, 4, 6))
    times = pipeline_times("1f1b", forward, backward, transfer=0.1)
    assert times.starts.shape == times.ends.shape == (2 * 4 * 6, 3)
    assert times.rank_ends.shape == (4, 3)
    for index, operation in enumerate(times.operations):
        seconds = (backward if operation.backward else forward)[:, operation.stage, operation.micro_batch]
        np.testing.assert_allclose(times.ends[index] - times.starts[index], seconds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zbv_zero_bubble", 2, 4, 1), "two stages on each rank, not 1"),
        (("interleaved_zero_bubble", 2, 5, 1), "5 micro-batches cannot be divided into 2"),
    ],
)
def test_mistakes_are_named_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message):
        rank_operations(*arguments)


def test_weight_seconds_are_part_of_the_backward():
    times = np.ones((2, 2))
    with pytest.raises(UserError, match="between 0 and the backward seconds"):
        pipeline_makespan("interleaved_zero_bubble", times, times, weight=2 * times)
