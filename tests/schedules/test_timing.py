import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.errors import UserError
from wlb.schedules.operations import rank_operations
from wlb.schedules.timing import pipeline_makespan, pipeline_makespans


def event_driven_makespan(schedule, forward, backward, virtual_stages):
    """An oracle that knows nothing of waves: ranks as queues, messages that arrive, a clock that moves on."""
    stages, micro_batches = forward.shape
    pp = stages // virtual_stages
    queues = [[o[:3] for o in ops] for ops in rank_operations(schedule, pp, micro_batches, virtual_stages)]
    arrived = {(0, i, False) for i in range(micro_batches)}
    busy = [False] * pp
    finishing: list[tuple[float, int, int, int, bool]] = []
    clock = 0.0

    def start_what_can_start():
        for rank in range(pp):
            if queues[rank] and not busy[rank] and queues[rank][0] in arrived:
                stage, i, is_backward = queues[rank].pop(0)
                seconds = (backward if is_backward else forward)[stage, i]
                heapq.heappush(finishing, (clock + seconds, rank, stage, i, is_backward))
                busy[rank] = True

    start_what_can_start()
    while finishing:
        clock, rank, stage, i, is_backward = heapq.heappop(finishing)
        busy[rank] = False
        if is_backward:
            arrived.add((stage - 1, i, True))
        else:
            arrived.add((stage + 1, i, False) if stage < stages - 1 else (stage, i, True))
        start_what_can_start()
    assert not any(queues)
    return clock


@st.composite
def pipelines(draw):
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b"]))
    pp = draw(st.integers(1, 5))
    interleaved = schedule == "interleaved_1f1b"
    micro_batches = pp * draw(st.integers(1, 3)) if interleaved else draw(st.integers(1, 10))
    virtual_stages = draw(st.integers(1, 3)) if interleaved else 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    # Integers make ties, which the two simulations must break to the same effect.
    times = rng.integers(0, 6, (2, pp * virtual_stages, micro_batches)).astype(float)
    return schedule, times[0], times[1], virtual_stages


@settings(deadline=None)
@given(pipelines())
def test_agrees_with_an_event_driven_simulation(pipeline):
    assert pipeline_makespan(*pipeline) == event_driven_makespan(*pipeline)


@settings(deadline=None)
@given(pipelines())
def test_is_no_shorter_than_its_busiest_rank_and_its_longest_micro_batch(pipeline):
    schedule, forward, backward, virtual_stages = pipeline
    total = forward + backward
    by_rank = total.reshape(virtual_stages, -1, total.shape[1]).sum(axis=(0, 2))
    makespan = pipeline_makespan(schedule, forward, backward, virtual_stages)
    assert max(by_rank.max(), total.sum(axis=0).max()) <= makespan <= total.sum()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 1), (1, 5), (2, 2), (4, 8), (8, 8), (4, 2)])
def test_equal_times_give_the_textbook_makespan(schedule, pp, micro_batches):
    forward, backward = np.full((pp, micro_batches), 1.0), np.full((pp, micro_batches), 2.5)
    expected = (micro_batches + pp - 1) * 3.5
    assert pipeline_makespan(schedule, forward, backward) == pytest.approx(expected)


@pytest.mark.parametrize(("pp", "micro_batches", "virtual_stages"), [(2, 4, 2), (4, 8, 2), (4, 4, 3)])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(pp, micro_batches, virtual_stages):
    forward = np.full((pp * virtual_stages, micro_batches), 1.0)
    expected = (micro_batches * virtual_stages + pp - 1) * 3
    assert pipeline_makespan("interleaved_1f1b", forward, 2 * forward, virtual_stages) == expected


def test_one_slow_micro_batch_holds_up_every_stage():
    forward = np.ones((4, 8))
    forward[:, 3] = 5
    balanced = pipeline_makespan("1f1b", np.full((4, 8), forward.mean()), np.full((4, 8), 2 * forward.mean()))
    assert pipeline_makespan("1f1b", forward, 2 * forward) > 1.5 * balanced


@settings(deadline=None)
@given(pipelines())
def test_a_batch_is_priced_like_its_members(pipeline):
    schedule, forward, backward, virtual_stages = pipeline
    scale = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])[..., None, None]
    together = pipeline_makespans(schedule, scale * forward, scale * backward, virtual_stages)
    alone = pipeline_makespan(schedule, forward, backward, virtual_stages)
    np.testing.assert_array_equal(together, scale[..., 0, 0] * alone)


@pytest.mark.parametrize(
    ("forward", "backward", "virtual_stages", "message"),
    [
        (np.ones(4), np.ones(4), 1, r"shape \(4,\)"),
        (np.ones((2, 4, 8)), np.ones((2, 4, 8)), 1, r"shape \(2, 4, 8\); expected \(stages, micro_batches\)"),
        (np.ones((4, 8)), np.ones((4, 7)), 1, r"\(4, 8\), backward seconds \(4, 7\)"),
        (np.ones((0, 8)), np.ones((0, 8)), 1, "none of them 0"),
        (np.ones((5, 8)), np.ones((5, 8)), 2, "5 stages cannot be dealt 2 to a rank"),
        (np.ones((4, 8)), np.ones((4, 8)), 0, "cannot be dealt 0 to a rank"),
        (np.full((4, 8), np.nan), np.ones((4, 8)), 1, "negative value or NaN"),
        (np.ones((4, 8)), -np.ones((4, 8)), 1, "negative value or NaN"),
    ],
)
def test_mistakes_are_named_in_one_line(forward, backward, virtual_stages, message):
    with pytest.raises(UserError, match=message) as caught:
        pipeline_makespan("interleaved_1f1b", forward, backward, virtual_stages)
    assert "\n" not in str(caught.value)
