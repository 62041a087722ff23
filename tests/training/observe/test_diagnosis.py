"""The diagnosis names what costs time: the plan's unevenness by dimension, slow machines, slow data."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases import in_turn
from tests.training.observe.rows import EVEN, MICRO_BATCHES, NAMES, diagnosis_of, rows_of
from wlb.training.observe.diagnosis import RankName, StragglerWatch, diagnose, expected_seconds, render
from wlb.training.observe.imbalance import RankStep, RankSteps, rank_steps


def test_an_even_job_has_no_causes():
    diagnosis = diagnosis_of(rows_of(EVEN))
    assert (diagnosis["causes"], diagnosis["slowest_over_mean"]) == ([], 1.0)
    assert "no cause costs 2% of a step" in render(diagnosis)


@in_turn(
    ("axis", "what", "setting", "pooled"),
    [
        (0, "pp", "virtual_pp", False),
        (1, "dp", "packing.assignment", False),
        (2, "cp", "sharding.strategy", False),
        (1, "dp", "pools differ (1.17): raise parallel.pool", True),
        (2, "cp", "ranks of a pool differ (1.17): lower packing.pool_micro_batches", True),
    ],
)
def test_an_uneven_plan_names_its_setting(axis, what, setting, pooled):
    uneven = EVEN.copy()
    np.moveaxis(uneven, axis, 0)[1] = 1.4
    (cause,) = diagnosis_of(rows_of(uneven), pooled=pooled)["causes"]
    assert (cause["what"], cause["cost"]) == (what, pytest.approx(1.4 / 1.2 - 1))
    assert setting in cause["text"]


def test_ranks_of_level_steps_wait_for_the_slowest_of_them():
    """Each has seconds of its own there, of any number of micro-batches."""
    rows = rows_of(np.ones((1, 1, 8, 1, 1)))
    for name in rows.dtype.names or ():
        if name.endswith("_seconds") and "wait" not in name:
            rows[name][3] = 1.8
    diagnosis = diagnose(
        [rows], NAMES, (1, 1, 8, 1), None, last_step=9, step_seconds=5.0, straggler_factor=9.0, pooled=True
    )
    (cause,) = diagnosis["causes"]
    assert (cause["what"], cause["cost"]) == ("cp", pytest.approx(1.8 / 1.1 - 1))
    assert cause["text"].startswith("ranks over a step differ (1.64): raise packing.global_batch")
    assert diagnosis["imbalance"]["dp"] == {"predicted": 1.0, "measured": 1.0}
    assert diagnosis["imbalance"]["micro_batches"] == {"predicted": None, "measured": None}
    assert "pool_micro_batches" not in render(diagnosis)


def test_uneven_micro_batches_cost_what_the_pipeline_waits_for_them():
    uneven = EVEN.copy()
    uneven[..., 0] = 3.0
    (cause,) = diagnosis_of(rows_of(uneven))["causes"]
    assert (cause["what"], cause["cost"]) == ("micro_batches", pytest.approx((3.0 / 1.5 - 1) / MICRO_BATCHES))
    assert "packing.method" in cause["text"]


def test_a_slow_machine_is_told_from_an_uneven_plan():
    measured = EVEN.copy()
    measured[1, 0, 1, 0] = 2.5
    diagnosis = diagnosis_of(rows_of(measured, predicted=EVEN))
    lines = {line.split()[0]: line.split() for line in render(diagnosis).splitlines() if line.startswith("  ")}
    assert lines["slowest"][1:5] == ["10", "2.105", "rank", "5"]
    assert lines["cp"][1:] == ["1.158", "1.000"]  # measured, predicted
    first, *others = diagnosis["causes"]
    assert first["what"] == "straggler"
    assert first["text"].startswith("rank 5 (host node0, process 205, cuda:5) takes 2.50 times the seconds expected")
    assert {cause["what"] for cause in others} == {"cp", "pp", "dp"}
    assert all("the plan predicts 1.00" in cause["text"] for cause in others)
    slowest = max(diagnosis["ranks"], key=lambda rank: rank["normalised"])
    assert [slowest[name] for name in ("rank", "pp", "dp", "cp", "tp")] == [5, 1, 0, 1, 0]
    assert slowest["normalised"] == pytest.approx(diagnosis["slowest_over_mean"]) == pytest.approx(2.5 / (9.5 / 8))


@in_turn(("field", "what"), [("data_wait_seconds", "data"), ("core_wait_seconds", "cores")])
def test_waiting_for_something_else_is_a_cause(field, what):
    rows = rows_of(EVEN)
    rows[field][6] = 0.5
    (cause,) = diagnosis_of(rows, step_seconds=5.0)["causes"]
    assert (cause["what"], cause["cost"]) == (what, 0.1)
    assert "rank 6 (host node0, process 206, cuda:6) waits 0.5 s a step for" in cause["text"]


RANKS = [RankName(f"host{rank // 2}", 100 + rank, f"cuda:{rank % 2}") for rank in range(4)]
WORK = np.array([1.0, 2.0, 1.0, 4.0])


def step_of(slowdown: list[float], core_wait: float = 0.0) -> RankSteps:
    # The clock runs 3 times as fast as the workload model says: only ranks compared with each other count.
    rows = [
        RankStep(0.0, 0.0, work, work, work)._replace(compute_seconds=work / 3 * slow, core_wait_seconds=core_wait)
        for work, slow in zip(WORK[: len(slowdown)], slowdown, strict=True)
    ]
    return rank_steps(np.array(rows))


def observe(watch: StragglerWatch, slowdown: list[float], steps: int, core_wait: float = 0.0) -> list[str]:
    return [line for _ in range(steps) for line in watch.observe(step_of(slowdown, core_wait))]


def test_a_slow_rank_is_named_with_its_seconds_once():
    even = StragglerWatch(RANKS, 1, 1.5)
    assert observe(even, [1.0, 1.2, 1.0, 1.4], steps=20) == []  # work that is merely uneven
    assert observe(even, [1.0, 1.0, 3.0, 1.0], steps=1) == []  # one slow step
    watch = StragglerWatch(RANKS, 1, 1.5)
    assert observe(watch, [1.0, 1.0, 1.0, 3.0], steps=4) == []
    assert observe(watch, [1.0, 1.0, 1.0, 3.0], steps=9) == [
        "rank 3 (host host1, process 103, cuda:1) is slow: 4 s of compute a step where 1.33 s is expected of it"
    ]
    assert watch.slow == {3}
    assert observe(watch, [1.0, 1.0, 1.0, 1.45], steps=10) == []  # better, but no recovery
    assert observe(watch, [1.0, 1.0, 1.0, 1.6], steps=10) == []
    assert observe(watch, [1.0] * 4, steps=10) == []
    assert watch.slow == frozenset()
    (line,) = observe(StragglerWatch(RANKS, 1, 1.5), [1.0, 1.0, 1.0, 3.0], steps=5, core_wait=2.5)
    assert line.endswith("1.33 s is expected of it; 2.5 s of it waiting for a core that others have")


@in_turn(("slowdown", "slow"), [([1.0, 2.0], {1}), ([2.0, 1.0], {0}), ([1.0, 1.0], set()), ([9.0], set())])
def test_of_two_ranks_one_can_be_slow_and_a_lone_rank_cannot(slowdown, slow):
    watch = StragglerWatch(RANKS[: len(slowdown)], 1, 1.5)
    observe(watch, slowdown, steps=5)
    assert watch.slow == slow


def test_ranks_of_a_stage_are_compared_with_each_other():
    predicted = np.ones(8)
    measured = np.array([1.0, 1.1, 1.0, 1.0, 2.0, 2.0, 2.0, 4.0])  # the model underestimates the second stage
    assert expected_seconds(measured, predicted, stages=2).tolist() == [1.0] * 4 + [2.0] * 4
    # Two ranks cannot tell which of them is odd, so all are compared.
    assert expected_seconds(measured[2:6], predicted[2:6], stages=2).tolist() == [1.0] * 4
