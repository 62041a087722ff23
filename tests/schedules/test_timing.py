import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.errors import UserError
from wlb.schedules.operations import BACKWARD, rank_operations
from wlb.schedules.timing import pipeline_makespan, pipeline_times


def event_driven_makespan(schedule, forward, backward, virtual_stages, *, transfer):
    """An oracle that knows nothing of waves: ranks as queues, messages that arrive, a clock that moves on."""
    stages, micro_batches = forward.shape
    pp = stages // virtual_stages
    queues = [
        [(stage, i, kind == BACKWARD) for stage, i, kind in ops]
        for ops in rank_operations(schedule, pp, micro_batches, virtual_stages)
    ]
    arrived = {(0, i, False) for i in range(micro_batches)}
    busy = [False] * pp
    # When a rank has run an operation (True), or the input of one arrives at it.
    events: list[tuple[float, bool, int, tuple[int, int, bool]]] = []
    clock = 0.0

    def start_what_can_start():
        for rank in range(pp):
            if queues[rank] and not busy[rank] and queues[rank][0] in arrived:
                stage, i, is_backward = operation = queues[rank].pop(0)
                seconds = (backward if is_backward else forward)[stage, i]
                heapq.heappush(events, (clock + seconds, True, rank, operation))
                busy[rank] = True

    start_what_can_start()
    while events:
        clock, has_run, rank, (stage, i, is_backward) = heapq.heappop(events)
        if not has_run:
            arrived.add((stage, i, is_backward))
        else:
            busy[rank] = False
            turns = stage == stages - 1 and not is_backward
            follower = (stage, i, True) if turns else (stage + (-1 if is_backward else 1), i, is_backward)
            if follower[0] >= 0:
                way = transfer[i] if follower[0] % pp != rank else 0.0
                heapq.heappush(events, (clock + way, False, rank, follower))
        start_what_can_start()
    assert not any(queues)
    return clock


@st.composite
def pipelines(draw):
    schedule = draw(st.sampled_from(["1f1b", "interleaved_1f1b"]))
    pp = draw(st.integers(1, 5))
    interleaved = schedule == "interleaved_1f1b"
    micro_batches = pp * draw(st.integers(1, 3)) if interleaved else draw(st.integers(1, 10))
    virtual_stages = draw(st.integers(1, 3)) if interleaved else 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    # Integers make ties, which the two simulations must break to the same effect.
    times = rng.integers(0, 6, (2, pp * virtual_stages, micro_batches)).astype(float)
    return schedule, times[0], times[1], virtual_stages


@settings(deadline=None)
@given(pipelines(), st.integers(0, 2**32))
def test_agrees_with_an_event_driven_simulation(pipeline, seed):
    transfer = np.random.default_rng(seed).integers(0, 4, pipeline[1].shape[1]).astype(float)
    assert pipeline_makespan(*pipeline, transfer=transfer) == event_driven_makespan(*pipeline, transfer=transfer)


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 1), (1, 5), (2, 2), (4, 8), (8, 8), (4, 2)])
def test_equal_times_give_the_textbook_makespan(pp, micro_batches):
    forward, backward = np.full((pp, micro_batches), 1.0), np.full((pp, micro_batches), 2.5)
    expected = (micro_batches + pp - 1) * 3.5
    assert pipeline_makespan("1f1b", forward, backward) == pytest.approx(expected)


@pytest.mark.parametrize(("pp", "micro_batches", "virtual_stages"), [(2, 4, 2), (4, 8, 2), (4, 4, 3)])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(pp, micro_batches, virtual_stages):
    forward = np.full((pp * virtual_stages, micro_batches), 1.0)
    expected = (micro_batches * virtual_stages + pp - 1) * 3
    assert pipeline_makespan("interleaved_1f1b", forward, 2 * forward, virtual_stages) == expected


@settings(deadline=None)
@given(pipelines())
def test_a_batch_is_priced_like_its_members(pipeline):
    schedule, forward, backward, virtual_stages = pipeline
    scale = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])[..., None, None]
    together = pipeline_makespan(schedule, scale * forward, scale * backward, virtual_stages)
    alone = pipeline_makespan(schedule, forward, backward, virtual_stages)
    np.testing.assert_array_equal(together, scale[..., 0, 0] * alone)


def test_times_of_operations_fit_together():
    rng = np.random.default_rng(0)
    forward, backward = rng.random((2, 3, 4, 6))
    times = pipeline_times(rank_operations("1f1b", 4, 6), forward, backward, transfer=0.1)
    assert times.starts.shape == times.ends.shape == (2 * 4 * 6, 3)
    assert times.rank_ends.shape == (4, 3)
    for index, operation in enumerate(times.operations):
        seconds = (backward if operation.kind == BACKWARD else forward)[:, operation.stage, operation.micro_batch]
        np.testing.assert_allclose(times.ends[index] - times.starts[index], seconds)


def test_operations_are_those_of_the_stages_and_micro_batches_that_have_seconds():
    with pytest.raises(ValueError, match=r"4 stages and 6 micro-batches, operations \(2, 6\)"):
        pipeline_times(rank_operations("1f1b", 2, 6), np.ones((4, 6)), np.ones((4, 6)))


@pytest.mark.parametrize(
    ("forward", "backward", "virtual_stages", "message"),
    [
        (np.ones(4), np.ones(4), 1, r"shape \(4,\)"),
        (np.ones((4, 8)), np.ones((4, 7)), 1, r"\(4, 8\), backward seconds \(4, 7\)"),
        (np.ones((0, 8)), np.ones((0, 8)), 1, "none of them 0"),
        (np.ones((5, 8)), np.ones((5, 8)), 2, "5 stages cannot be dealt 2 to a rank"),
        (np.full((4, 8), np.nan), np.ones((4, 8)), 1, "negative value or NaN"),
    ],
)
def test_mistakes_are_named_in_one_line(forward, backward, virtual_stages, message):
    with pytest.raises(UserError, match=message) as caught:
        pipeline_makespan("interleaved_1f1b", forward, backward, virtual_stages)
    assert "\n" not in str(caught.value)
