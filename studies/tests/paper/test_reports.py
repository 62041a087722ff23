"""Every experiment, made small: labelled columns, finite numbers, a picture, JSON."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.simulate.space import SearchSpace, search_space
from wlb_studies.experiment import Report, Settings
from wlb_studies.paper import bench, paper, speedups, table2
from wlb_studies.registry import EXPERIMENTS, OF_THE_PAPER

STEPS = {"imbalance": 1, "table2": 8, "sharding": 8}
KINDS = {"", "quoted", "simulated", "measured"}


def with_few_layouts(*job: Any, fixed: dict[str, Any], **settings: Any) -> SearchSpace:
    return search_space(*job, fixed={"tp": 2, "cp": 4} | fixed, **settings)


def check_report(report: Report) -> None:
    assert report.tables
    for table in report.tables:
        assert {column.kind for column in table.columns} <= KINDS
        for row in table.rows:
            assert len(row) == len(table.columns)
            for value, column in zip(row, table.columns, strict=True):
                if column.kind:
                    assert value is None or math.isfinite(float(value)), (column, row)
    json.dumps(report.to_json(), allow_nan=False)


@pytest.fixture(scope="module")
def long_documents(tmp_path_factory) -> Settings:
    """A step of fewer documents than the synthetic ones."""
    path = tmp_path_factory.mktemp("reports") / "lengths.json"
    path.write_text(json.dumps(sample_lengths(3000, 131_072, 0, median_fraction=1 / 16).tolist()))
    return Settings(lengths=str(path), steps=1)


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_report_of_every_experiment(name, long_documents, tmp_path, monkeypatch):
    monkeypatch.setattr(table2, "_SOLVER_SECONDS", 0.05)
    monkeypatch.setattr(table2, "_SOLVER_STEPS", 4)
    monkeypatch.setattr(speedups, "JOBS", ("550m-64k",))
    monkeypatch.setattr(speedups, "LARGEST", "7b-64k")
    some = ("plain-4d", "wlb-llm, lists", "balanced")
    monkeypatch.setattr(speedups, "OWN", {system: speedups.OWN[system] for system in some})
    monkeypatch.setattr(bench, "search_space", with_few_layouts)
    settings = Settings(steps=STEPS[name]) if name in STEPS else long_documents
    report = EXPERIMENTS[name](replace(settings, out=tmp_path))
    check_report(report)
    report.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    if name == "breakdown":
        quoted = {row[0]: row[1] for row in report.tables[0].rows if row[1] is not None}
        assert quoted == paper.BREAKDOWN


def test_lengths_of_a_file_take_the_place_of_synthetic_ones(tmp_path):
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps([70_000, 1_000, 30_000, 500] * 50))
    report = EXPERIMENTS["sharding"](Settings(lengths=str(lengths), steps=4))
    assert report.documents == str(lengths)
    check_report(report)


def test_documents_that_fill_no_window_are_refused(tmp_path):
    lengths = tmp_path / "lengths.json"
    lengths.write_text("[1000, 2000]")
    with pytest.raises(UserError, match="less than one window"):
        EXPERIMENTS["breakdown"](Settings(lengths=str(lengths), steps=1))
