"""A report on lengths: complete, safe, self-contained, and its recommendation is a configuration."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.report.conftest import HOSTILE, WINDOW, small_job
from tests.report.html.test_markup import read
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.job.config_file import load_config
from wlb.report.evidence import (
    AS_FAST,
    BASELINE,
    BEST,
    ELASTIC,
    LENGTH_FACTORS,
    RECOMMENDED,
    Evidence,
    fast_with_least_delay,
    gather_evidence,
    with_least_checkpointing,
)
from wlb.report.gain import Gain
from wlb.report.predicted import predicted_report, recommended_config
from wlb.simulate import simulated_job
from wlb.simulate.rate import rate

CHARTS = ["gain-chart", "lengths", "packing-chart", "where-chart", "ranks-chart", "pipeline-chart", "sharding-chart"]


def test_it_has_every_chart_and_no_way_out(hostile_page):
    reader = read(hostile_page)
    charts = [attributes["id"] for name, attributes in reader.elements if name == "svg"]
    assert charts == CHARTS
    assert not {name for name, _ in reader.elements} & {"script", "img", "link", "iframe", "object", "form", "a"}
    written = {key for _, attributes in reader.elements for key in attributes}
    assert not written & {"src", "href", "style", "action"}
    assert not [key for key in written if key.startswith("on")]
    assert not re.search(r"url\(|@import", hostile_page)


def test_names_from_outside_stay_text(hostile_page):
    assert HOSTILE not in hostile_page
    assert HOSTILE in read(hostile_page).text


def test_it_has_the_figures_of_the_simulation(evidence: Evidence):
    page = predicted_report(evidence, source="lengths.json", model="7b", hardware="h100")
    assert f"{evidence.gains[BEST].factor:.2f}x" in page
    for name, system in evidence.systems.items():
        result = rate(system.job, evidence.lengths, system.steps, evidence.job.work_prices)
        np.testing.assert_allclose(system.step_seconds, result.step_seconds)
        np.testing.assert_allclose(system.step_work_seconds, result.step_work_seconds)
        whole = evidence.job.workload.document_seconds(WINDOW) / WINDOW  # a token's of the longest document
        assert np.all(system.step_work_seconds > 0)
        assert np.all(system.step_work_seconds < whole * system.step_tokens)
        assert sum(system.where.values()) == pytest.approx(system.mean_step_seconds)
        assert name in page


def test_the_headline_is_the_speed_at_equal_work(evidence: Evidence):
    """Work left undone is no gain: a system that trains the same tokens in the same time, but cut, is slower."""
    best = evidence.systems[BEST]
    cut = replace(best, step_work_seconds=0.5 * best.step_work_seconds)
    shown = replace(evidence, systems=evidence.systems | {BASELINE: best, BEST: cut, ELASTIC: cut})
    assert shown.gains[BEST].factor == pytest.approx(0.5)
    assert shown.gains_in_tokens[BEST].factor == pytest.approx(1.0)
    text = read(predicted_report(shown, source="lengths.json", model="7b", hardware="h100")).text
    assert text.index("0.50xspeed at equal work, elastic over plain-4d") < text.index("tokens/s")


def test_before_and_after_are_the_presets(evidence: Evidence):
    assert set(evidence.systems) == {"plain-4d", "fixed-4d", "wlb-llm", "best", "elastic"}
    assert set(evidence.gains) == set(evidence.systems) - {BASELINE}
    assert evidence.gains[BEST].low <= evidence.gains[BEST].factor <= evidence.gains[BEST].high


def test_the_recommended_l_max_is_fast_and_has_the_least_delay(evidence: Evidence):
    assert [one.max_length_factor for one in evidence.tried] == list(LENGTH_FACTORS)
    assert evidence.job.packing.method == RECOMMENDED
    assert max(one.speed for one in evidence.tried) == 1.0
    fast = [one for one in evidence.tried if one.speed >= 1 - AS_FAST]
    assert evidence.recommended == min(fast, key=lambda one: one.token_delay)
    assert [one.memory_bytes for one in evidence.tried] == sorted(one.memory_bytes for one in evidence.tried)


def test_l_max_stays_within_the_memory():
    """Of a 7B model on 8 GPUs there is room for one and a half windows of 256K, not for two."""
    job = simulated_job("7b", 262_144, dp=1, pp=1, cp=1, tp=8, packing={"micro_batches": 2})
    evidence = gather_evidence(sample_lengths(400, 262_144, seed=1), job, 2)
    room = with_least_checkpointing(job)[1]
    assert room is not None
    assert 1.5 <= room < 2
    assert [one.max_length_factor for one in evidence.tried] == [1.0, 1.25, 1.5]


def test_delay_decides_between_the_fast_ones_only(evidence: Evidence):
    slow, near, fast = (
        replace(evidence.systems[BEST], work_seconds=work, token_delay=delay, seconds=1.0)
        for work, delay in ((0.98, 0.1), (0.991, 0.2), (1.0, 0.3))
    )
    assert fast_with_least_delay([slow, near, fast]) is near
    assert fast_with_least_delay([slow]) is slow


@pytest.mark.parametrize("store", [None, "data/my corpus", 'quote " \\ backslash \x7f \t\n ü'])
def test_the_recommendation_loads(evidence: Evidence, tmp_path: Path, store):
    config = tmp_path / "job.toml"
    config.write_text(recommended_config(evidence.job, "7b", "lengths\nwith [lines].json", store), encoding="utf-8")
    loaded = load_config(config)
    assert loaded.preset == "best"
    assert loaded.packing == evidence.job.packing
    assert (loaded.parallel.dp, loaded.parallel.pp, loaded.parallel.cp, loaded.parallel.tp) == (2, 2, 2, 8)
    assert loaded.data.context_window == WINDOW
    assert store is None or str(loaded.data.store) == store


def test_doubts_are_said(evidence: Evidence):
    def shown(factor: float, low: float, steps: int) -> str:
        gains = dict.fromkeys(evidence.gains, Gain(factor, low, factor + 0.1, steps))
        doubtful = replace(evidence, fits=steps > 5)
        doubtful.__dict__["gains"] = gains
        return predicted_report(doubtful, source="lengths.json", model="7b", hardware="h100")

    doubts = "reaches down to plain-4d", "too few for an interval", "finds no room"
    assert [doubt in shown(0.9, 0.8, 5) for doubt in doubts] == [True, True, True]
    assert [doubt in shown(1.2, 1.1, 50) for doubt in doubts] == [False, False, False]


def test_checkpointing_is_the_least_that_leaves_room():
    """Of a 7B model on 8 GPUs of 80 GB: more tokens, more recomputation, and in the end no room."""
    levels = []
    for window in (8192, 65_536, 1_048_576):
        job = simulated_job("7b", window, "best", dp=1, pp=1, cp=1, tp=8)
        found, room = with_least_checkpointing(job)
        levels.append((found.activation_checkpointing, room is not None))
    assert levels[0] == ("none", True)
    assert levels[1][1]
    assert levels[1][0] != "none"
    assert levels[2] == ("none", False)


def test_documents_that_fill_no_step_are_refused():
    with pytest.raises(UserError, match="give more documents"):
        gather_evidence(np.array([100, 200]), small_job(), 10)


def test_elastic_is_recommended_where_it_is_as_fast(evidence: Evidence):
    def shown(of_elastic: float) -> str:
        changed = replace(evidence)
        gains = {name: Gain(1.2, 1.1, 1.3, 20) for name in evidence.gains}
        changed.__dict__["gains"] = gains | {ELASTIC: Gain(of_elastic, 1.1, 1.5, 20)}
        return predicted_report(changed, source="lengths.json", model="7b", hardware="h100")

    faster, slower = shown(1.4), shown(1.1)
    assert "Preset elastic does 1.40 times the work of plain-4d in the same time, and no document is delayed" in faster
    assert "preset = &quot;elastic&quot;" in faster
    assert "Preset best does 1.20 times the work of plain-4d" in slower
    assert "preset = &quot;best&quot;" in slower
