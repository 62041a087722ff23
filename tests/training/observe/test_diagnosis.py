"""The diagnosis names what costs time: the plan's unevenness by dimension, slow machines, slow data."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.training.observe.test_imbalance import rows_of
from wlb.training.observe.diagnosis import RankName, diagnose, render
from wlb.training.observe.imbalance import RankSteps

SHAPE = (2, 2, 2, 1)
MICRO_BATCHES = 4
NAMES = [RankName("node0", 200 + rank, f"cuda:{rank}") for rank in range(8)]
EVEN = np.ones((*SHAPE, MICRO_BATCHES))


def diagnosis_of(rows: RankSteps, step_seconds: float = 5.0, *, pooled: bool = False) -> dict[str, Any]:
    diagnosis = diagnose(
        [rows] * 3,
        NAMES,
        SHAPE,
        MICRO_BATCHES,
        last_step=30,
        step_seconds=step_seconds,
        straggler_factor=1.5,
        pooled=pooled,
    )
    assert json.loads(json.dumps(diagnosis, allow_nan=False)) == diagnosis
    return diagnosis


def causes_of(diagnosis: dict[str, Any]) -> list[str]:
    return [cause["what"] for cause in diagnosis["causes"]]


def test_an_even_job_has_no_causes():
    diagnosis = diagnosis_of(rows_of(EVEN))
    assert (diagnosis["causes"], diagnosis["slowest_over_mean"]) == ([], 1.0)
    assert "no cause costs 2% of a step" in render(diagnosis)


@pytest.mark.parametrize(
    ("axis", "what", "setting", "pooled"),
    [
        (0, "pp", "virtual_pp", False),
        (1, "dp", "packing.assignment", False),
        (2, "cp", "sharding.strategy", False),
        (0, "pp", "virtual_pp", True),
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
    first, *others = diagnosis["causes"]
    assert first["what"] == "straggler"
    assert first["text"].startswith("rank 5 (host node0, process 205, cuda:5) takes 2.50 times the seconds expected")
    assert {cause["what"] for cause in others} == {"cp", "pp", "dp"}
    assert all("the plan predicts 1.00" in cause["text"] for cause in others)
    slowest = max(diagnosis["ranks"], key=lambda rank: rank["normalised"])
    assert [slowest[name] for name in ("rank", "pp", "dp", "cp", "tp")] == [5, 1, 0, 1, 0]
    assert slowest["normalised"] == pytest.approx(diagnosis["slowest_over_mean"]) == pytest.approx(2.5 / (9.5 / 8))


@pytest.mark.parametrize(("field", "what"), [("data_wait_seconds", "data"), ("core_wait_seconds", "cores")])
def test_waiting_for_something_else_is_a_cause(field, what):
    rows = rows_of(EVEN)
    rows[field][6] = 0.5
    (cause,) = diagnosis_of(rows, step_seconds=5.0)["causes"]
    assert (cause["what"], cause["cost"]) == (what, 0.1)
    assert "rank 6 (host node0, process 206, cuda:6) waits 0.5 s a step for" in cause["text"]


def test_the_table_shows_ranks_and_dimensions():
    uneven = EVEN.copy()
    uneven[:, 1] = 1.5
    text = render(diagnosis_of(rows_of(uneven)))
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("  ")}
    assert lines["slowest"][1:5] == ["6", "1.200", "rank", "2"]
    assert lines["fastest"][1:5] == ["4", "0.800", "rank", "0"]
    assert lines["dp"][1:] == ["1.200", "1.200"]
    assert lines["cp"][1:] == ["1.000", "1.000"]
    of_pools = render(diagnosis_of(rows_of(uneven), pooled=True))
    assert "pools              1.200       1.200\n" in of_pools
    assert "in a pool          1.000       1.000\n" in of_pools
