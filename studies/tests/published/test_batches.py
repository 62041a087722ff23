"""Measured batches on files that the simulator itself makes: what was run is recovered, and exactly predicted."""

import json
from typing import Any

import numpy as np
import pytest

from wlb_studies.published import batches as module
from wlb_studies.published.batches import TABLES, measured_batch_rows
from wlb_studies.published.prediction import compared, summaries

_TOKENS = 16_384
_MODEL = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"


def lists_of(seed: int, count: int) -> list[list[int]]:
    """``count`` lists of ``_TOKENS`` tokens, of some long documents and many short ones."""
    draw = np.random.default_rng(seed)
    lists = []
    for _ in range(count):
        cuts = np.unique(draw.integers(1, _TOKENS, draw.integers(1, 9)))
        lists.append(np.diff(np.concatenate([[0], cuts, [_TOKENS]])).tolist())
    return lists


def run_of(mode: str, path: str = "some/run.json", batches: int = 8, lists: int = 8, **config: Any) -> dict[str, Any]:
    settings = {"mode": mode, "tp_size": 8, "dp_size": 4, "num_layers": 2, "model_path": _MODEL}
    return {
        "path": path,
        "commit": "0123abc",
        "config": settings | config,
        "batches": [{"documents": lists_of(seed, lists), "ms": 100.0} for seed in range(batches)],
    }


def measured_as_predicted(run: dict[str, Any], setting: str) -> dict[str, Any]:
    """``run`` with the milliseconds that the simulator predicts under ``setting``, once it is found among all."""
    described = module._described(run, tuple(batch["documents"] for batch in run["batches"]))
    seconds = module._CANDIDATES[described.mode](described)
    measured = [
        batch | {"ms": 1e3 * float(second)} for batch, second in zip(run["batches"], seconds[setting], strict=True)
    ]
    return run | {"batches": measured}


def rows_of(*runs: dict[str, Any]) -> list[Any]:
    return measured_batch_rows(json.loads(json.dumps({"meta": {}, "runs": runs})))


@pytest.mark.parametrize(
    ("run", "setting"),
    [
        (run_of("baseline"), "adjacent lists on a rank"),
        (run_of("baseline"), "lists dealt in turn"),
        (run_of("wlbllm", cp_size=1), "L_max is the mean"),
        (run_of("wlbllm", cp_size=2), "no L_max"),
        (run_of("wlbllm"), "one context-parallel group"),
        (run_of("wlbllm"), f"one context-parallel group{module._IN_PYTHON}"),
        (run_of("d2", batches=4), "attention level"),
        (run_of("d2", batches=4, lists=2, cp_size=1), "attention within 10%"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["config"]["mode"],
)
def test_what_was_run_is_recovered_and_predicted(run, setting):
    rows = rows_of(measured_as_predicted(run, setting))
    assert [row.run for row in rows] == ["some/run.json"] * len(run["batches"])
    assert {row.table for row in rows} == {TABLES[run["config"]["mode"]]}
    assert all(row.assumed.startswith((f"{setting}; ", f"{setting} (of 2 settings")) for row in rows)
    assert len({row.row for row in rows}) == len(rows)
    np.testing.assert_allclose([row.predicted_seconds for row in rows], [row.measured_seconds for row in rows])
    assert {row.reason for row in rows} == {None}


def test_a_setting_is_recovered_though_all_batches_are_slower_and_one_is_much():
    run = measured_as_predicted(run_of("baseline", batches=9), "lists dealt in turn")
    for index, batch in enumerate(run["batches"]):
        batch["ms"] *= 1.5 if index == 1 else 1.2
    rows = rows_of(run)
    assert all(row.assumed.startswith("lists dealt in turn (of 2 settings") for row in rows)
    assert [row.measured_seconds / row.predicted_seconds for row in rows] == pytest.approx([1.2, 1.5, *[1.2] * 7])


def test_warming_up_is_predicted_and_left_out_of_statistics():
    run = measured_as_predicted(run_of("baseline"), "lists dealt in turn")
    run["batches"][0]["ms"] *= 3
    rows = rows_of(run)
    assert rows[0].measured_seconds == pytest.approx(3 * rows[0].predicted_seconds)
    assert "1.6 times the median" in rows[0].left_out
    assert {(row.reason, row.left_out) for row in rows[1:]} == {(None, None)}
    (summary,) = summaries(rows, "run")
    assert (summary.rows, summary.count) == (8, 7)
    assert summary.worst_error == pytest.approx(0.0, abs=1e-12)


def test_a_measurement_that_two_runs_have_counts_once():
    first, second = (measured_as_predicted(run_of("baseline", path), "lists dealt in turn") for path in ("a", "b"))
    rows = rows_of(first, second)
    assert len(compared(rows)) == 8
    assert {row.left_out for row in rows[8:]} == {"the same measurement as in a"}


def test_a_run_that_no_packer_explains_has_no_prediction():
    run = run_of("wlbllm", cp_size=1)
    for batch, ms in zip(run["batches"], np.random.default_rng(0).uniform(100, 150, 8), strict=True):
        batch["ms"] = float(ms)
    rows = rows_of(run)
    assert {row.predicted_seconds for row in rows} == {None}
    (reason,) = {row.reason for row in rows}
    assert reason.startswith("packer not recovered from how measured seconds follow predicted ones: under each of 2")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"mode": "other"}, "mode 'other' is not simulated"),
        ({"mode": ["baseline"]}, "mode \"['baseline']\" is not simulated"),
        ({"model_path": "some/model"}, "the shape of some/model is unknown here"),
        ({"num_layers": None}, "its num_layers is not published"),
        ({"dp_size": 0}, "its dp_size is not a size: 0"),
        ({"mode": "wlbllm", "cp_size": "8"}, "its cp_size is not a size: 8"),
        ({"tp_size": 3}, "tp = 3 does not divide 32 query heads and 8 key/value heads; choose a tp that divides both"),
    ],
)
def test_what_a_run_does_not_say_is_the_reason(config, reason):
    rows = rows_of(run_of(**{"mode": "baseline"} | config))
    assert [(row.predicted_seconds, row.reason) for row in rows] == [(None, reason)] * 8


def test_runs_before_the_kernels_were_fused_are_slower():
    old, new = (rows_of(run_of("baseline", f"{date}/run.json", batches=1))[0] for date in ("20250815", "20250816"))
    assert old.predicted_seconds > new.predicted_seconds
