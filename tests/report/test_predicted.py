"""A report on lengths: complete, safe, self-contained, and its recommendation is a configuration."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from tests.report.conftest import HOSTILE, WINDOW, small_job
from tests.test_markup import read
from wlb.documents.store.reader import TokenStoreWriter
from wlb.errors import UserError
from wlb.job.config_file import load_config
from wlb.report.evidence import Evidence, gather_evidence
from wlb.report.gain import Gain
from wlb.report.predicted import predicted_report, recommended_config
from wlb.simulate import simulate
from wlb.simulate.verdict import BASELINE, BEST, ELASTIC, Verdict
from wlb.workload import MODEL_SHAPES

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
        verdict = evidence.verdict
        result = simulate(system.job, evidence.lengths, system.steps, warm_up=verdict.warm_up)
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
    cut = replace(best, step_work_seconds=0.5 * best.step_work_seconds, work_seconds=0.5 * best.work_seconds)
    shown = replace(evidence, verdict=Verdict(dict(evidence.systems) | {BASELINE: best, BEST: cut, ELASTIC: cut}, 0))
    assert shown.gains[BEST].factor == pytest.approx(0.5)
    assert shown.gains_in_tokens[BEST].factor == pytest.approx(1.0)
    text = read(predicted_report(shown, source="lengths.json", model="7b", hardware="h100")).text
    assert text.index("0.50xspeed at equal work, best over plain-4d") < text.index("tokens/s")


def test_before_and_after_are_the_presets(evidence: Evidence):
    assert set(evidence.systems) == {"plain-4d", "fixed-4d", "wlb-llm", "best", "elastic"}
    assert set(evidence.gains) == set(evidence.systems) - {BASELINE}
    assert evidence.gains[BEST].low <= evidence.gains[BEST].factor <= evidence.gains[BEST].high


@pytest.mark.parametrize("store", [None, "data/my corpus", 'quote " \\ backslash \x7f \t\n ü'])
def test_the_recommendation_loads(evidence: Evidence, tmp_path: Path, store):
    config, systems = tmp_path / "job.toml", dict(evidence.systems)
    verdict = Verdict({name: systems[name] for name in (BASELINE, BEST)}, 0)
    config.write_text(recommended_config(verdict, "7b", "lengths\nwith [lines].json", store), encoding="utf-8")
    loaded = load_config(config)
    assert loaded.preset == "best"
    assert loaded.packing == evidence.job.packing
    assert (loaded.parallel.dp, loaded.parallel.pp, loaded.parallel.cp, loaded.parallel.tp) == (2, 2, 2, 8)
    assert loaded.data.context_window == WINDOW
    assert store is None or str(loaded.data.store) == store


def test_the_recommended_vocabulary_is_one_that_tp_divides(evidence: Evidence, tmp_path: Path):
    with TokenStoreWriter(tmp_path / "bytes", vocab_size=257) as writer:
        writer.add(np.zeros(9, np.int64))
    text = recommended_config(evidence.verdict, "7b", "bytes", str(tmp_path / "bytes"))
    assert (evidence.job.layout.tp, tomllib.loads(text)["model"]["vocab_size"]) == (8, 264)


def test_the_model_of_a_profile_is_recommended(evidence: Evidence):
    names = ("context_window", "packing", "layout", "activation_checkpointing")
    job = SimpleNamespace(**{name: getattr(evidence.job, name) for name in names})
    tiny = MODEL_SHAPES["tiny"]
    for shape, name in ((replace(tiny, vocab_size=7), "tiny"), (replace(tiny, layers=9), "MODEL OF THE PROFILE")):
        job.pricing = SimpleNamespace(profile=SimpleNamespace(model=shape))
        verdict = Mock(Verdict, preset=BEST, configured=lambda: job)
        text = recommended_config(verdict, "llama3-8b", "lengths.json")
        assert tomllib.loads(text)["model"] == {"name": name}


def test_doubts_are_said(evidence: Evidence):
    def shown(factor: float, low: float, steps: int) -> str:
        gains = dict.fromkeys(evidence.gains, Gain(factor, low, factor + 0.1, steps))
        doubtful = replace(evidence)
        doubtful.__dict__.update(gains=gains, fits=steps > 5)
        return predicted_report(doubtful, source="lengths.json", model="7b", hardware="h100")

    doubts = "reaches down to plain-4d", "too few for an interval", "finds no room"
    assert [doubt in shown(0.9, 0.8, 5) for doubt in doubts] == [True, True, True]
    assert [doubt in shown(1.2, 1.1, 50) for doubt in doubts] == [False, False, False]


def test_documents_that_fill_no_step_are_refused():
    with pytest.raises(UserError, match="give more documents"):
        gather_evidence(np.array([100, 200]), small_job(), 10)
