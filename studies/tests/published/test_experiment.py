"""``wlb-studies validate``: every row in order, summaries, JSON, a picture."""

import json
from itertools import chain

import pytest

from scripts import figures
from studies.tests.paper.test_reports import check_report
from wlb_studies.experiment import Settings
from wlb_studies.published import experiment
from wlb_studies.published.prediction import Prediction, summaries
from wlb_studies.published.reading import read_measurements
from wlb_studies.published.whole_steps import whole_step_row

KEYS = {"table", "run", "row", "source", "measured_seconds", "predicted_seconds", "reason", "assumed"}
SUMMARY = {"by", "name", "rows", "count", "median_error", "median_absolute_error", "worst_error", "bias"}


@pytest.fixture(scope="module")
def report():
    return experiment.run(Settings())


def test_report_and_picture(report, tmp_path):
    check_report(report)
    report.draw(tmp_path / "published.png")
    assert (tmp_path / "published.png").stat().st_size > 10_000


def test_every_row_is_there_in_order_with_a_prediction_or_a_reason(report):
    own, rows = read_measurements(), report.to_json()["rows"]
    for given, one in zip(own["rows"], rows, strict=False):
        assert one["table"] == given["table"] + (", functional runs" if given.get("functional") else "")
        assert one["source"].split()[0] == given["repo"].split()[0]
    batches = [one for one in rows if one["run"]]
    assert len(rows) >= len(own["rows"]) + len(own["kernels"]) + len(batches)
    assert [one["run"] for one in batches] == [run["path"] for run in own["runs"] for _ in run["batches"]]
    for one in rows:
        assert one.keys() >= KEYS
        assert (one["predicted_seconds"] is None) == (one["reason"] is not None), one
    assert sum(one["predicted_seconds"] is not None for one in rows[: len(own["rows"])]) > 120


def test_the_results_in_the_repository_are_these(report):
    kept, found = figures.result("validate"), report.to_json()
    for before, now in zip(kept["tables"], json.loads(json.dumps(found["tables"])), strict=True):
        assert (before["title"], len(before["rows"])) == (now["title"], len(now["rows"]))
        for old, new in zip(chain(*before["rows"]), chain(*now["rows"]), strict=True):
            same = old == (pytest.approx(new, rel=1e-6) if isinstance(new, float) else new)
            assert same, "run .venv/bin/python scripts/figures.py validate"


def test_summaries_of_tables_and_runs_count_every_row(report):
    document = report.to_json()
    of_tables = [one for one in document["summaries"] if one["by"] == "table"]
    assert sum(one["rows"] for one in of_tables) == len(document["rows"])
    assert all(one.keys() >= SUMMARY | {"correlation", "slope"} for one in of_tables)
    of_runs = {one["name"] for one in document["summaries"] if one["by"] == "run"}
    assert of_runs == {run["path"] for run in read_measurements()["runs"]}


def test_functional_runs_are_in_no_summary_of_others(report):
    document = report.to_json()
    functional = [one for one in document["rows"] if one["kind"] == "functional runs"]
    marked = [whole_step_row(row) for row in read_measurements()["rows"] if row.get("functional")]
    assert len(functional) == sum(one.predicted_seconds is not None for one in marked) > 0
    for one in document["summaries"]:
        others = [row for row in document["rows"] if row[one["by"]] == one["name"] and row not in functional]
        assert one["name"].endswith("functional runs") or one["rows"] == len(others)


def test_a_summary_by_hand():
    def one(measured, predicted):
        return Prediction("t", "", "r", "s", measured, predicted)

    (found,) = summaries([one(2.0, 1.0), one(4.0, 3.0), one(6.0, 5.0), one(1.0, None), one(None, None)], "table")
    assert (found.name, found.rows, found.count) == ("t", 5, 3)
    assert found.median_error == pytest.approx(-0.25)
    assert found.median_absolute_error == pytest.approx(0.25)
    assert found.worst_error == pytest.approx(-0.5)
    assert found.bias == pytest.approx((-1 / 2 - 1 / 4 - 1 / 6) / 3)
    assert found.correlation == pytest.approx(1.0)
    assert found.slope == pytest.approx(1.0)


def test_nothing_to_compare_is_told_and_drawn(tmp_path):
    row = {key: read_measurements()["rows"][0][key] for key in ("table", "repo", "commit", "path", "model", "metric")}
    (tmp_path / "measured.json").write_text(json.dumps({"rows": [{**row, "value": 1.0}]}))
    report = experiment.run(Settings(measured=tmp_path / "measured.json"))
    check_report(report)
    assert [one["predicted_seconds"] for one in report.to_json()["rows"]] == [None]
    report.draw(tmp_path / "published.png")
    assert (tmp_path / "published.png").is_file()
