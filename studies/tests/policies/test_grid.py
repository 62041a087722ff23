"""The rivals experiment: its table, what it finds, and that jobs that are done are not computed again."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from studies.tests.paper.test_reports import check_report
from wlb.errors import UserError
from wlb_studies.experiment import Settings
from wlb_studies.policies import BASE, POLICIES, Outcome
from wlb_studies.policies import grid as rivals

PLAIN = Outcome(BASE, "tp 1", 2, [4, 8, 4], [4.0, 4.0, 4.0], [4.0, 8.0, 4.0], 0.0, 0.0, 1e9, 2e9, 0.1, 5)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs of every job that is computed; DistCA is the fastest on it, and FlexSP finds no layout."""
    jobs: list[int] = []

    def compare(names, space, lengths, steps):
        jobs.append(space.gpus)
        if space.gpus == 64 and space.context_window == 2**18:
            raise UserError("no layout")
        seconds = {"balanced": [3.2, 3.2, 3.2], "distca": [2.0, 2.0, 1.0]}
        outcomes = [
            replace(PLAIN, policy=name, draw_seconds=seconds.get(name, PLAIN.draw_seconds))
            for name in names
            if name != "flexsp"
        ]
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
    assert rows["distca"][:3] == pytest.approx((2.4, 2.4, 2.4))
    assert rows["flexsp"][:3] == (None, None, None)
    assert rows["libra"][3] == rivals.CLAIMS["libra"]
    assert "llama3-8b-256k-64" in report.notes[-1]  # too large for its GPUs
    assert report.findings[0].holds is False  # ours is slower than DistCA here
    assert report.findings[0].evidence.startswith("distca 2.40 (2.00 to 4.00), balanced 1.25 (1.25 to 1.25)")
    assert report.notes[0] == "ours is the fastest in 0 of 3 jobs"
    report.draw(tmp_path / "picture.png")


def test_a_job_that_is_done_is_read_and_one_of_other_settings_is_not(computed: list[int], tmp_path: Path):
    rivals.run(Settings(steps=2, out=tmp_path))
    rivals.run(Settings(steps=2, out=tmp_path))
    assert computed == [64, 256, 1024, 64]
    rivals.run(Settings(steps=3, out=tmp_path))
    assert computed == [64, 256, 1024, 64] * 2


def test_a_new_policy_runs_alone(computed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    policies = rivals.POLICIES
    monkeypatch.setattr(rivals, "POLICIES", {name: policies[name] for name in policies if name != "distca"})
    first = rivals.run(Settings(steps=2, out=tmp_path))
    monkeypatch.setattr(rivals, "POLICIES", policies)
    asked: list[list[str]] = []
    compare = rivals.compare

    def compared(names, *rest):
        asked.append(names)
        return compare(names, *rest)

    monkeypatch.setattr(rivals, "compare", compared)
    second = rivals.run(Settings(steps=2, out=tmp_path))
    assert asked == [["distca"]] * 3  # one job has no layout
    assert [row for row in second.tables[0].rows if row[0] != "distca"] == first.tables[0].rows
    assert [row[0] for row in second.tables[0].rows] == [*policies]


def test_claims_are_of_policies_that_are_compared():
    assert set(rivals.CLAIMS) <= set(POLICIES)
    assert len({job.name for job in rivals.JOBS}) == len(rivals.JOBS)


def test_source_code_fills_its_windows():
    for job in {job.source: job for job in rivals.JOBS if job.source}.values():
        lengths = rivals.documents_of(job, Settings())
        assert lengths.min() > 0
        assert lengths.sum() > 2 * job.batch_tokens
        if job.source == "stdlib":  # heavy-tailed, as pre-training corpora are: that is why it is the default corpus
            assert len(lengths) > 5000
            assert lengths.max() > 50 * np.median(lengths)


def test_source_code_comes_out_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rivals, "stdlib_root", lambda: Path(json.__file__).parent)  # a part of it
    for job in {job.source: job for job in rivals.JOBS if job.source}.values():
        lengths = rivals.documents_of(job, Settings())
        assert len(lengths) > 1
        assert lengths.tolist() == rivals.documents_of(job, Settings()).tolist()
