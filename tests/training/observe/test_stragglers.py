"""A slow rank is reported once an episode, by name; work that is merely uneven is not."""

from __future__ import annotations

import numpy as np
import pytest

from wlb.training.observe.diagnosis import RankName, StragglerWatch, expected_seconds
from wlb.training.observe.imbalance import RankStep, RankSteps, rank_steps

NAMES = [RankName(f"host{rank // 2}", 100 + rank, f"cuda:{rank % 2}") for rank in range(4)]
WORK = np.array([1.0, 2.0, 1.0, 4.0])


def step_of(slowdown: list[float], core_wait: float = 0.0) -> RankSteps:
    # The clock runs 3 times as fast as the workload model says: only ranks compared with each other count.
    seconds = WORK[: len(slowdown)]
    rows = [
        RankStep(0.0, 0.0, work, work, work)._replace(compute_seconds=work / 3 * slow, core_wait_seconds=core_wait)
        for work, slow in zip(seconds, slowdown, strict=True)
    ]
    return rank_steps(np.array(rows))


def observe(watch: StragglerWatch, slowdown: list[float], steps: int, core_wait: float = 0.0) -> list[str]:
    return [line for _ in range(steps) for line in watch.observe(step_of(slowdown, core_wait))]


def test_uneven_work_is_not_slow():
    assert observe(StragglerWatch(NAMES, 1, 1.5), [1.0, 1.2, 1.0, 1.4], steps=20) == []


def test_a_slow_rank_is_named_with_its_seconds_once():
    watch = StragglerWatch(NAMES, 1, 1.5)
    assert observe(watch, [1.0, 1.0, 1.0, 3.0], steps=4) == []
    assert observe(watch, [1.0, 1.0, 1.0, 3.0], steps=9) == [
        "rank 3 (host host1, process 103, cuda:1) is slow: 4 s of compute a step where 1.33 s is expected of it"
    ]
    assert watch.slow == {3}
    assert observe(watch, [1.0, 1.0, 1.0, 1.45], steps=10) == []  # better, but no recovery
    assert observe(watch, [1.0, 1.0, 1.0, 1.6], steps=10) == []
    assert observe(watch, [1.0] * 4, steps=10) == []
    assert watch.slow == frozenset()
    assert len(observe(watch, [1.0, 1.0, 1.0, 3.0], steps=10)) == 1


def test_one_slow_step_is_no_straggler():
    watch = StragglerWatch(NAMES, 1, 1.5)
    observe(watch, [1.0] * 4, steps=5)
    assert observe(watch, [1.0, 1.0, 3.0, 1.0], steps=1) == []
    assert observe(watch, [1.0] * 4, steps=5) == []


@pytest.mark.parametrize(("slowdown", "slow"), [([1.0, 2.0], {1}), ([2.0, 1.0], {0}), ([1.0, 1.0], set())])
def test_of_two_ranks_one_can_be_slow(slowdown, slow):
    watch = StragglerWatch(NAMES[:2], 1, 1.5)
    observe(watch, slowdown, steps=5)
    assert watch.slow == slow


def test_a_job_of_one_rank_has_no_stragglers():
    watch = StragglerWatch(NAMES[:1], 1, 1.5)
    assert [observe(watch, [slowdown], steps=1) for slowdown in (1.0, 5.0, 9.0, 9.0, 9.0, 9.0)] == [[]] * 6


def test_ranks_of_a_stage_are_compared_with_each_other():
    predicted = np.ones(8)
    measured = np.array([1.0, 1.1, 1.0, 1.0, 2.0, 2.0, 2.0, 4.0])  # the model underestimates the second stage
    assert expected_seconds(measured, predicted, stages=2).tolist() == [1.0] * 4 + [2.0] * 4
    # Two ranks cannot tell which of them is odd, so all are compared.
    assert expected_seconds(measured[2:6], predicted[2:6], stages=2).tolist() == [1.0] * 4


def test_a_rank_that_waits_for_a_core_is_told_so():
    (line,) = observe(StragglerWatch(NAMES, 1, 1.5), [1.0, 1.0, 1.0, 3.0], steps=5, core_wait=2.5)
    assert line.endswith("1.33 s is expected of it; 2.5 s of it waiting for a core that others have")
