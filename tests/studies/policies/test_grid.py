"""The rivals experiment: its table, what it finds, and that jobs that are done are not computed again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.studies.paper.test_reports import check_report
from wlb.errors import UserError
from wlb.studies.experiment import Settings
from wlb.studies.policies import BASE, POLICIES, Outcome
from wlb.studies.policies import grid as rivals

PLAIN = Outcome(BASE, "tp 1", 2, 1000, 10.0, 10.0, 0.0, 0.0, 1e9, 2e9, 0.1, 5)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs of every job that is computed; DistCA is the fastest on it, and FlexSP finds no layout."""
    jobs: list[int] = []

    def compare(names, space, lengths):
        jobs.append(space.gpus)
        if space.gpus == 64 and space.context_window == 2**18:
            raise UserError("no layout")
        speeds = {"best": 8.0, "distca": 5.0}
        outcomes = [replace(PLAIN, policy=name, seconds=speeds.get(name, 10.0)) for name in names if name != "flexsp"]
        return outcomes, {"flexsp": "no layout"}

    monkeypatch.setattr(rivals, "compare", compare)
    monkeypatch.setattr(rivals, "_workers", lambda: ThreadPoolExecutor(1))
    monkeypatch.setattr(rivals, "JOBS", rivals.JOBS[:4])
    return jobs


def test_its_table_has_every_policy_beside_its_claim(computed: list[int], tmp_path: Path):
    report = rivals.run(Settings(steps=2, out=tmp_path))
    check_report(report)
    rows = {row[0]: row[1:] for row in report.tables[0].rows}
    assert [*rows] == [*POLICIES]
    assert rows["distca"][:3] == (2.0, 2.0, 2.0)
    assert rows["flexsp"][:3] == (None, None, None)
    assert rows["libra"][3] == rivals.CLAIMS["libra"]
    assert "llama3-8b-256k-64" in report.notes[-1]  # too large for its GPUs
    assert not any(finding.holds for finding in report.findings)  # ours is slower than DistCA here
    report.draw(tmp_path / "picture.png")


def test_a_job_that_is_done_is_read_and_one_of_other_settings_is_not(computed: list[int], tmp_path: Path):
    rivals.run(Settings(steps=2, out=tmp_path))
    rivals.run(Settings(steps=2, out=tmp_path))
    assert computed == [64, 256, 1024, 64]
    rivals.run(Settings(steps=3, out=tmp_path))
    assert computed == [64, 256, 1024, 64] * 2


def test_claims_are_of_policies_that_are_compared():
    assert set(rivals.CLAIMS) <= set(POLICIES)
    assert {job.context_window for job in rivals.JOBS} == {2**17, 2**18, 2**19, 2**20}
    assert {job.model for job in rivals.JOBS} == {"llama3-8b", "llama3-70b"}
    assert min(job.gpus for job in rivals.JOBS) == 64
    assert max(job.gpus for job in rivals.JOBS) == 1024
