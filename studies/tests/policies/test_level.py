"""The experiment of level steps, on a job that is small."""

from pathlib import Path

import pytest

from studies.tests.paper.test_reports import check_report
from wlb_studies.experiment import Settings, column_of
from wlb_studies.policies import level
from wlb_studies.policies.grid import RivalJob


def test_level_steps_are_the_nearest_to_the_ideal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(level, "JOBS", (RivalJob("550m", 8, 2**15),))
    monkeypatch.setattr(level, "_PICTURED", ("550m-32k-8",))
    monkeypatch.setattr(level, "BATCH_TOKENS", 2**19)
    report = level.run(Settings(steps=1))
    check_report(report)
    shares = dict(zip((row[0] for row in report.tables[0].rows), column_of(report.tables[0], 1), strict=True))
    assert 1 > (shares["level"] or 0.0) > (shares["even pools"] or 0.0)
    report.draw(tmp_path / "picture.png")
