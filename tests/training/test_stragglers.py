"""A slow rank is reported once an episode, by name; work that is merely uneven is not."""

from __future__ import annotations

import numpy as np
import pytest

from wlb.training.stragglers import RankName, StragglerWatch

NAMES = [RankName(f"host{rank // 2}", 100 + rank, f"cuda:{rank % 2}") for rank in range(4)]
WORK = np.array([1.0, 2.0, 1.0, 4.0])


def observe(watch: StragglerWatch, slowdown: list[float], steps: int) -> list[str]:
    # The clock runs 3 times as fast as the workload model says: only ranks compared with each other count.
    return [line for _ in range(steps) for line in watch.observe(WORK / 3 * slowdown, WORK)]


def test_uneven_work_is_not_slow():
    assert observe(StragglerWatch(NAMES, 1.5), [1.0, 1.2, 1.0, 1.4], steps=20) == []


def test_a_slow_rank_is_named_with_its_seconds_once():
    watch = StragglerWatch(NAMES, 1.5)
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
    watch = StragglerWatch(NAMES, 1.5)
    observe(watch, [1.0] * 4, steps=5)
    assert observe(watch, [1.0, 1.0, 3.0, 1.0], steps=1) == []
    assert observe(watch, [1.0] * 4, steps=5) == []


@pytest.mark.parametrize(("slowdown", "slow"), [([1.0, 2.0], {1}), ([2.0, 1.0], {0}), ([1.0, 1.0], set())])
def test_of_two_ranks_one_can_be_slow(slowdown, slow):
    watch = StragglerWatch(NAMES[:2], 1.5)
    for _ in range(5):
        watch.observe(np.array(slowdown), np.ones(2))
    assert watch.slow == slow


def test_a_job_of_one_rank_has_no_stragglers():
    watch = StragglerWatch(NAMES[:1], 1.5)
    assert [watch.observe(np.array([seconds]), np.ones(1)) for seconds in (1.0, 5.0, 9.0, 9.0, 9.0, 9.0)] == [[]] * 6
