import heapq
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.errors import UserError
from wlb.schedules.critical_path import PipelineLoad, _Ranks, critical_path_lists
from wlb.schedules.operations import BACKWARD, FORWARD, INPUT, WEIGHT, rank_operations
from wlb.schedules.timing import pipeline_makespan, pipeline_times


def event_driven_makespan(operations, forward, backward, weight=None, joined=None, *, transfer):
    """An oracle that knows nothing of waves: ranks as queues, messages that arrive, a clock that moves on."""
    stages, micro_batches = forward.shape
    pp = len(operations)
    queues = [[*ops] for ops in operations]
    arrived = {(0, i, FORWARD) for i in range(micro_batches)}
    busy, last = [False] * pp, [(-1, "")] * pp

    def seconds_of(stage, i, kind):
        if kind == WEIGHT:
            return weight[stage, i] - joined[stage, i] * (last[stage % pp] == (stage, kind))
        return forward[stage, i] if kind == FORWARD else backward[stage, i] - (kind == INPUT and weight[stage, i])

    # When a rank has run an operation (True), or the input of one arrives at it.
    events: list[tuple[float, bool, int, tuple[int, int, str]]] = []
    clock = 0.0

    def start_what_can_start():
        for rank in range(pp):
            if queues[rank] and not busy[rank] and queues[rank][0] in arrived:
                stage, _, kind = operation = queues[rank].pop(0)
                heapq.heappush(events, (clock + seconds_of(*operation), True, rank, operation))
                busy[rank], last[rank] = True, (stage, kind)

    start_what_can_start()
    while events:
        clock, has_run, rank, (stage, i, kind) = heapq.heappop(events)
        if not has_run:
            arrived.add((stage, i, kind))
        else:
            busy[rank] = False
            goes_back = BACKWARD if weight is None else INPUT
            turns = stage == stages - 1 and kind == FORWARD
            follower = (stage, i, goes_back) if turns else (stage + (1 if kind == FORWARD else -1), i, kind)
            if follower[0] >= 0 and kind != WEIGHT:
                way = transfer[i] if follower[0] % pp != rank else 0.0
                heapq.heappush(events, (clock + way, False, rank, follower))
            if kind == INPUT:
                arrived.add((stage, i, WEIGHT))
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
    schedule, forward, backward, virtual_stages = pipeline
    rng = np.random.default_rng(seed)
    transfer = rng.choice([0.0, 1.0]) * rng.integers(0, 4, forward.shape[1])
    operations = rank_operations(schedule, len(forward) // virtual_stages, forward.shape[1], virtual_stages)
    expected = event_driven_makespan(operations, forward, backward, transfer=transfer)
    assert pipeline_times(operations, forward, backward, transfer=transfer).rank_ends.max() == expected
    if not transfer.any():
        assert pipeline_makespan(*pipeline) == expected


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_weight_parts_in_a_row_agree_with_it_too(seed, pp, per_rank, documents):
    rng, shape = np.random.default_rng(seed), (pp * per_rank, sum(documents))
    joined, weight, backward = rng.integers(0, 4, (3, *shape)).cumsum(axis=0)
    forward, transfer = rng.integers(0, 6, shape), rng.integers(0, 4, shape[1])
    load = PipelineLoad(forward, backward, weight, transfer, 1 + 0 * forward, joined=joined)
    ranks = _Ranks(load, documents, pp, [int(rng.integers(1, 20))] * pp)
    with mock.patch("wlb.schedules.critical_path._Ranks", return_value=ranks):
        lists = critical_path_lists(load, documents, pp, [])
    times = pipeline_times(lists, forward.astype(float), backward.astype(float), weight, joined, transfer=transfer)
    assert times.rank_ends.tolist() == [rank.free for rank in ranks.each]  # as planned
    assert max(rank.free for rank in ranks.each) == event_driven_makespan(
        lists, forward, backward, weight, joined, transfer=transfer
    )


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
