"""Charts are well-formed, accessible, and as long as their values."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from wlb.report.bootstrap import Gain
from wlb.report.html.charts import bars, intervals, length_histogram, series
from wlb.report.html.diagrams import areas_by_document, shard_chart
from wlb.report.html.markup import LETTER, WIDTH, Caption, Scale
from wlb.sharding import STRATEGIES, make_shard_plan
from wlb_studies.sharding import pairs_of_ranks

CAPTION = Caption("chart", "A title", "and a note")


def parse(figure: str) -> ElementTree.Element:
    """The chart as XML; checks what every chart must have."""
    (svg,) = ElementTree.fromstring(figure).findall("svg")
    assert svg.get("role") == "img"
    labels = [svg.find(f"*[@id='{name}']") for name in (svg.get("aria-labelledby") or "").split()]
    assert [label.tag for label in labels if label is not None and label.text] == ["title", "desc"]
    ends = [float(rect.get("x", 0)) + float(rect.get("width", 0)) for rect in svg.iter("rect")]
    assert all(end <= WIDTH + 1 for end in ends)
    for label in svg.iter(
        "text"
    ):  # as wide as text may be; charts are scaled to the page, so this holds on a phone too
        size, share = (
            LETTER * len(label.text or ""),
            {"start": 0, "middle": 0.5, "end": 1}[label.get("text-anchor", "")],
        )
        left = float(label.get("x", 0)) - share * size
        assert -8 <= left <= left + size <= WIDTH + 12, label.text
    assert "nan" not in figure.lower().replace("</span>", "")
    return svg


def boxes(svg: ElementTree.Element, class_: str) -> list[float]:
    return [float(rect.get("width", 0)) for rect in svg.iter("rect") if rect.get("class") == class_ and len(rect)]


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.integers(1, 2**20), min_size=1, max_size=50))
def test_histogram_of_any_lengths(lengths):
    svg = parse(length_histogram(np.array(lengths)))
    hints = [title.text or "" for rect in svg.iter("rect") for title in rect.iter("title")]
    for kind in ("documents", "tokens", "attention"):
        shares = [float(hint.split(": ")[1].split("%")[0]) for hint in hints if hint.endswith(f"of {kind}")]
        assert sum(shares) == pytest.approx(100, abs=0.06 * len(shares))


def test_parts_of_bars_are_as_long_as_their_values():
    svg = parse(bars(CAPTION, [("row", [1.0, 3.0], "4 s")], "seconds", ["a", "b"]))
    assert boxes(svg, "part-1")[0] == pytest.approx(3 * boxes(svg, "part-0")[0], abs=0.05)


def test_intervals_and_series_are_drawn():
    svg = parse(intervals(CAPTION, [("x", Gain(1.2, 1.1, 1.3)), ("y", Gain(0.9, 0.8, 1.0))], "times"))
    assert len(list(svg.iter("circle"))) == 2
    steps = np.arange(5.0)
    svg = parse(series(CAPTION, [("run", "after", steps, steps**2)]))
    (line,) = svg.iter("polyline")
    assert len((line.get("points") or "").split()) == 5


def test_charts_of_long_jobs_stay_small():
    steps = np.arange(1_000_003.0)
    figure = series(CAPTION, [("run", "after", steps, np.ones(len(steps)))])
    parse(figure)
    assert len(figure) < 40_000
    assert not re.search(r'"\d+\.\d{3,}"', length_histogram(np.array([10, 1000, 70000])))  # coordinates are short


@pytest.mark.parametrize("cp", [2, 16])
def test_shards_show_every_strategy(cp):
    plans = [make_shard_plan([5000, 300, 800, 200, 90, 4000, 77], cp, strategy) for strategy in STRATEGIES]
    svg = parse(shard_chart(CAPTION, plans))
    shown = {element.text for element in svg.iter("text")}
    assert set(STRATEGIES) <= shown
    documents, areas = areas_by_document(plans)
    assert documents == ["5,000 tokens", "4,000 tokens", "800 tokens", "300 tokens", "200 tokens", "2 shorter"]
    for plan, area in zip(plans, areas, strict=True):
        np.testing.assert_allclose(area.sum(axis=1) * pairs_of_ranks(plan).mean(), pairs_of_ranks(plan))


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_inside(low, span):
    scale = Scale(low, low + span, 0, 100)
    ticks = scale.ticks()
    assert len(ticks) <= 12
    assert all(low - 1e-6 * span - 1e-9 <= tick <= low + span * (1 + 1e-6) + 1e-9 for tick in ticks)
