"""A report on lengths: complete, safe, self-contained, and its recommendation is a configuration."""

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.report.conftest import HOSTILE, WINDOW
from tests.report.html.reader import read
from wlb.documents.synthetic import sample_lengths
from wlb.report.answer import about
from wlb.report.evidence import Evidence
from wlb.report.predicted import lost_share, predicted_report
from wlb.simulate import simulate
from wlb.simulate.estimate import estimate
from wlb.simulate.search import drawn
from wlb.simulate.space import search_space
from wlb.simulate.verdict import BALANCED, BASELINE, PER_DOCUMENT, Verdict

CHARTS = ["gain-chart", "where-chart", "lengths", "pipeline-chart", "sharding-chart"]


def test_it_has_every_chart_and_no_way_out(hostile_page):
    reader = read(hostile_page)
    charts = [attributes["id"] for name, attributes in reader.elements if name == "svg"]
    assert charts == CHARTS
    assert not {name for name, _ in reader.elements} & {"script", "img", "link", "iframe", "object", "form", "a"}
    written = {key for _, attributes in reader.elements for key in attributes}
    assert not written & {"src", "href", "style", "action"}
    assert not [key for key in written if key.startswith("on")]
    assert not re.search(r"url\(|@import", hostile_page)


def test_names_from_outside_stay_text(evidence: Evidence, hostile_page: str):
    assert HOSTILE not in hostile_page
    assert HOSTILE in read(hostile_page).text
    assert evidence.found.config
    assert evidence.found.config in read(hostile_page).text


def test_it_has_the_figures_of_the_simulation(evidence: Evidence):
    page, verdict = read(predicted_report(evidence, read="lengths.json")).text, evidence.verdict
    assert page.index(verdict.headline) < min(map(page.index, verdict.reasons))
    assert all(line in page for line in about(evidence.found))
    assert f"{verdict.speed(BALANCED):.2f}x" in page
    prices = evidence.systems[BASELINE].job.work_prices
    for name, system in evidence.systems.items():
        results = [
            simulate(drawn(system.job, draw), evidence.lengths, 4, warm_up=verdict.warm_up, work_prices=prices)
            for draw in (0, 1, 2)
        ]
        assert system.step_seconds == [seconds for result in results for seconds in result.step_seconds]
        whole = prices.document_seconds(WINDOW) / WINDOW  # a token's of the longest document
        assert np.all(np.array(system.step_work_seconds) > 0)
        assert np.all(system.step_work_seconds < whole * np.array(system.step_tokens))
        assert sum(system.where.values()) == pytest.approx(system.mean_step_seconds)
        assert name in page


def test_the_headline_is_in_tokens_per_second_and_what_cutting_drops_comes_on_top(evidence: Evidence):
    best = evidence.verdict.of_draws[BALANCED][0]
    slow = replace(
        best,
        step_seconds=[2 * seconds for seconds in best.step_seconds],
        work_seconds=0.5 * best.work_seconds,
        attention_kept=0.75,
    )
    verdict = Verdict({BASELINE: [slow] * 3, BALANCED: [best] * 3})
    shown = replace(evidence, found=replace(evidence.found, verdict=verdict))
    text = read(predicted_report(shown, read="lengths.json")).text
    assert "2.00xtokens/s of balanced over plain-4d" in text
    assert "balanced also computes the 25% of attention that cutting documents drops: 4.00x at equal work." in text


def test_where_little_is_gained_there_is_no_job_to_copy(evidence: Evidence):
    best = evidence.systems[BALANCED]
    verdict = Verdict(dict.fromkeys((BASELINE, BALANCED), [best] * 3))
    kept = replace(evidence, found=replace(evidence.found, verdict=verdict, config=""))
    page = predicted_report(kept, read="lengths.json")
    assert "Keep what you have: no preset gains 5% in every shuffle." in page
    assert "Keep what you have: no preset gains enough here" in page
    assert "preset = " not in page
    charts = [attributes["id"] for name, attributes in read(page).elements if name == "svg"]
    assert charts == CHARTS  # with best as what could be had


def test_a_job_that_balanced_cannot_run_is_reported_too():
    """It may need more memory than plain-4d in the only layout."""
    lengths = sample_lengths(400, 4096, 0)
    space = search_space("tiny", 2, 4096, lengths, hardware="cpu", batch_tokens=4 * 4096)
    found = estimate(space, lengths, (BASELINE, PER_DOCUMENT), 1, source="lengths.json")
    page = predicted_report(Evidence(lengths, found), read="lengths.json")
    assert "over plain-4d" in page


def test_what_does_not_fit_is_said(evidence: Evidence):
    doubtful = replace(evidence)
    doubtful.__dict__["fits"] = False
    assert ["finds no room" in predicted_report(one, read="x") for one in (evidence, doubtful)] == [False, True]


def test_tiles_say_what_the_verdict_says(evidence: Evidence, hostile_page: str):
    verdict, page = evidence.verdict, read(hostile_page).text
    before, after = (lost_share(verdict, name) for name in (BASELINE, evidence.shown))
    assert f"{before:.0%} → {after:.0%}time lost to imbalance" in page
    (said,) = re.findall(r"loses (\d+)% of its time", str(verdict))
    assert abs(int(said) - 100 * before) <= 1
    assert evidence.usual_steps[BASELINE].lost == pytest.approx(before, abs=0.05)


def test_strategies_are_compared_on_several_documents(evidence: Evidence):
    lengths = evidence.shards[0].segment_lengths
    assert max(lengths) < 0.75 * sum(lengths)
    assert {plan.cp_size for plan in evidence.shards} == {2}
