"""Who gains: one row for each job, which says what ``wlb check`` says of it."""

from functools import partial
from pathlib import Path

import pytest

from wlb.documents.synthetic import sample_lengths
from wlb.simulate.estimate import estimate
from wlb.simulate.space import search_space
from wlb_studies import gains
from wlb_studies.experiment import Settings


def test_a_row_says_what_check_says_and_a_job_without_a_layout_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(gains, "MODELS", ("550m", "70b"))
    monkeypatch.setattr(gains, "WINDOWS", (8192,))
    monkeypatch.setattr(gains, "GPUS", (2,))
    monkeypatch.setattr(gains, "BATCH_TOKENS", 2**16)
    report = gains.run(Settings(out=tmp_path))
    small, large = report.tables[0].rows
    lengths = sample_lengths(gains.documents_of(8192, 2**16), 8192, 0)
    space = search_space("550m", 2, 8192, lengths, batch_tokens=2**16)
    verdict = estimate(space, lengths, source="synthetic").verdict
    speeds = verdict.speed("per-document-4d"), verdict.speed("balanced")
    assert small[:6] == ("550m", "8K", 2, sum(verdict.lost.values()), *speeds)
    assert large == ("70b", "8K", 2, *[None] * 8)

    monkeypatch.setattr(gains, "_row", lambda settings, *job: ["computed"] * 8)  # what is done is not computed again
    assert gains.run(Settings(out=tmp_path)).tables == report.tables
    again = gains.run(Settings(out=tmp_path, seed=1)).tables[0].rows
    assert [row[3] for row in again] == ["computed"] * 2


def test_mixtures_are_compared_in_layouts_with_ep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(gains, "MIXTURES", ("qwen3-30b-a3b",))
    monkeypatch.setattr(gains, "MIXTURE_WINDOWS", (8192,))
    monkeypatch.setattr(gains, "MIXTURE_GPUS", (16,))
    monkeypatch.setattr(gains, "BATCH_TOKENS", 2**18)
    monkeypatch.setattr(gains, "_MIXTURE_BATCH", 1)
    without_shards = partial(search_space, fixed={"tp": 1, "pp": 1})  # leaves cp, dp and ep to be searched
    monkeypatch.setattr(gains, "search_space", without_shards)
    (row,) = gains.mixtures(Settings(out=tmp_path, steps=1)).tables[0].rows
    assert row[:3] == ("qwen3-30b-a3b", "8K", 16)
    assert all("ep 16" in str(place) for place in row[-2:])
