"""The notebook runs from the first cell to the last; and what plans and results show in it are their own figures."""

from __future__ import annotations

import ast
import io
import json
import re
import shlex
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from wlb import MicroBatch, Segment, ShardPlan, StepPlan, make_shard_plan
from wlb.cli.app import app
from wlb.cli.groups import names_of
from wlb.cli.options import JobOptions
from wlb.documents.lengths import read_lengths
from wlb.markup import COLOURS
from wlb.sharding import STRATEGIES
from wlb.simulate.verdict import Verdict

NOTEBOOK = Path(__file__).parents[1] / "examples" / "lengths_to_gain.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
# What XML can hold, of what a name may be.
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), min_size=1)


class Shown(NamedTuple):
    """What a reader sees: the heading, figures by heading for every row, and its bars as (lane, tooltip, share)."""

    heading: str
    rows: list[dict[str, str]]
    bars: list[list[tuple[int, str, float]]]
    text: str


def shown(thing: Any) -> Shown:
    root = ElementTree.fromstring(thing._repr_html_())
    headings = ["".join(cell.itertext()) for cell in root.findall("table/thead/tr/th")]
    rows: list[dict[str, str]] = []
    bars: list[list[tuple[int, str, float]]] = []
    for row in root.findall("table/tbody/tr"):
        rows.append(dict(zip(headings, ["".join(cell.itertext()) for cell in row], strict=True)))
        rows[-1].pop("")  # of bars, whose text are tooltips
        bars.append([])
        for bar in row.iter("rect"):
            lane, width = int(bar.attrib["y"]) // 10, float(bar.attrib["width"].removesuffix("%"))
            bars[-1].append((lane, bar.findtext("title", ""), width / 100))
    return Shown(root.findtext("div/b", ""), rows, bars, "".join(root.itertext()))


def column(table: Shown, heading: str) -> list[float]:
    return [float(re.sub("[,x%]", "", row[heading])) for row in table.rows]


def are_drawn(table: Shown, lane: int, values: list[Mapping[str, float]]) -> bool:
    """Whether the bars of ``lane`` have the parts ``values``, and lengths in proportion to them."""
    most = max((sum(parts.values()) for parts in values), default=0) or 1
    for bars, parts in zip(table.bars, values, strict=True):
        mine = [(hint, share) for number, hint, share in bars if number == lane]
        assert [hint.partition(": ")[0] for hint, _ in mine] == [*parts]
        assert [share for _, share in mine] == pytest.approx([max(0, part / most) for part in parts.values()], abs=1e-4)
        figures = [float(hint.partition(": ")[2].replace(",", "")) for hint, _ in mine]
        assert figures == pytest.approx([*parts.values()], rel=5e-3, abs=1e-300)
    return True


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What all cells defined; ``printed`` is their text, ``displayed`` their last expressions."""
    found: dict[str, Any] = {"displayed": []}
    with redirect_stdout(io.StringIO()) as out:
        for cell in CELLS:
            if cell["cell_type"] == "code":
                assert not cell["outputs"], "commit it without outputs"
                source = "".join(cell["source"])
                exec(source, found)
                last = ast.parse(source).body[-1]
                if isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call):
                    found["displayed"].append(eval(ast.unparse(last), found))
    return found | {"printed": out.getvalue()}


def test_the_loop_trains_every_document_once_on_balanced_steps(names: dict[str, Any]):
    assert sorted(s.document for plan in names["balanced"] for s in plan.segments) == [*range(len(names["documents"]))]
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert max(plan.imbalance for plan in names["balanced"][:-1]) < 1.01
    assert np.mean([plan.imbalance for plan in names["usual"]]) > 1.1
    assert "step 0: loss" in names["printed"]
    assert [type(thing) for thing in names["displayed"]] == [Verdict, StepPlan, StepPlan]
    assert names["displayed"][1].imbalance > 1.5


def test_its_job_is_that_of_the_command_it_names(names: dict[str, Any]):
    """So its verdict is too: ``tests/simulate/test_estimate.py`` proves that commands give one number."""
    (command,) = re.findall(r"`wlb check (synthetic.+?)`", "".join(line for cell in CELLS for line in cell["source"]))
    check = typer.main.get_command(app).commands["check"]  # type: ignore[attr-defined]
    context = check.make_context("check", shlex.split(command))
    asked = JobOptions(**{name: context.params[name] for name in names_of(JobOptions)})
    lengths = read_lengths(context.params["lengths"])
    assert lengths.tolist() == names["lengths"].tolist()
    assert asked.question(context, None, lengths).space == names["question"].space
    assert context.params["systems"].split(",") == [*names["verdict"].systems]


def test_a_verdict_and_its_systems_show_their_figures(names: dict[str, Any]):
    verdict: Verdict = names["verdict"]
    table = shown(verdict)
    assert table.heading.startswith(str(verdict))
    assert [row["system"] for row in table.rows] == [*verdict.systems]
    assert column(table, "speed at equal work") == pytest.approx([*map(verdict.speed, verdict.systems)], abs=0.005)
    assert column(table, "token delay, steps") == pytest.approx([*map(verdict.token_delay, verdict.systems)], abs=0.005)
    assert column(table, "lost")[0] == pytest.approx(100 * sum(verdict.lost.values()), abs=0.05)
    assert are_drawn(table, 0, [verdict.parts(name) for name in verdict.systems])
    for result in verdict.systems.values():
        table = shown(result)
        where = {cause: seconds for cause, seconds in result.where.items() if seconds}
        assert [row["cause"] for row in table.rows] == [*where]
        assert column(table, "seconds") == pytest.approx([*where.values()], rel=5e-3)
        assert sum(column(table, "share")) == pytest.approx(100, abs=0.05 * len(where))
        assert f"{result.mean_step_seconds:.3g} s a step, {result.tokens_per_second:,.0f} tokens/s" in table.heading
        assert are_drawn(table, 0, [{"seconds of a step": seconds} for seconds in where.values()])


@st.composite
def step_plans(draw: st.DrawFn) -> StepPlan:
    lengths = st.lists(st.integers(1, 10**6), max_size=4)
    named = draw(st.booleans())
    ranks = st.frozensets(st.integers(0, 3), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    micro_batch = st.builds(
        lambda lengths, workload, ranks: MicroBatch(
            tuple(Segment(document, 0, length) for document, length in enumerate(lengths)), workload, ranks
        ),
        lengths,
        st.floats(0, 1e3),
        ranks if named else st.just(()),
    )
    of_rank = st.lists(micro_batch, max_size=3).map(tuple)
    return StepPlan(draw(st.integers(0, 10**6)), draw(st.lists(of_rank, min_size=1, max_size=3).map(tuple)))


@settings(max_examples=examples(50))
@given(step_plans())
def test_a_step_plan_shows_its_figures(plan: StepPlan):
    table, micro_batches = shown(plan), plan.micro_batches
    longest = [max(micro_batch.lengths, default=0) for micro_batch in micro_batches]
    assert f"Step {plan.step}: {plan.tokens:,} tokens" in table.heading
    assert f"imbalance {plan.imbalance:.3f}" in table.heading
    assert column(table, "work, s") == pytest.approx([m.workload for m in micro_batches], rel=5e-3)
    assert column(table, "tokens") == [micro_batch.tokens for micro_batch in micro_batches]
    assert column(table, "documents") == [len(micro_batch.segments) for micro_batch in micro_batches]
    assert column(table, "longest") == longest
    ranks = [row.get("on ranks", "") for row in table.rows]
    assert ranks == [", ".join(map(str, micro_batch.ranks)) for micro_batch in micro_batches]
    assert are_drawn(table, 0, [{"work": micro_batch.workload} for micro_batch in micro_batches])
    parts = [(most, m.tokens - most) for most, m in zip(longest, micro_batches, strict=True)]
    assert are_drawn(table, 1, [dict(zip(("longest document", "other documents"), p, strict=True)) for p in parts])


@settings(max_examples=examples(30))
@given(st.lists(st.integers(1, 10**5), min_size=1, max_size=8), st.integers(1, 5), st.sampled_from([*STRATEGIES]))
def test_a_shard_plan_shows_its_figures(lengths: list[int], cp: int, strategy: str):
    plan = make_shard_plan(lengths, cp, strategy)
    table = shown(plan)
    assert table.heading.startswith(f"{strategy}: {plan.tokens:,} tokens on {cp} rank")
    assert column(table, "tokens") == plan.tokens_per_rank.tolist()
    pairs = plan.attended_pairs.astype(float)
    assert column(table, "attention over mean") == pytest.approx(pairs / pairs.mean(), abs=5e-4)
    assert column(table, "K/V received") == plan.kv_traffic.sum(axis=0).tolist()
    assert sum(column(table, "longest document")) == max(lengths)
    first = plan.segment_starts[np.argmax(lengths)]
    for rank, of_longest in enumerate(column(table, "longest document")):
        positions = plan.positions(rank)
        assert ((positions >= first) & (positions < first + max(lengths))).sum() == of_longest
    assert are_drawn(table, 0, [{"attention": float(of_rank)} for of_rank in pairs])


@given(TEXT)
def test_names_are_text_and_no_markup(name: str):
    plan = make_shard_plan([3, 2], 2, "per_document")
    assert shown(ShardPlan(name, plan.segment_lengths, plan.pieces)).heading.startswith(f"{name}: 5 tokens")


def test_the_names_of_systems_are_text_and_no_markup(names: dict[str, Any]):
    hostile = "</table><script>alert('&')</script>"
    verdict = Verdict([{hostile: next(iter(names["verdict"].systems.values()))}])
    assert shown(verdict).rows[0]["system"] == hostile


def test_rows_that_are_not_shown_are_counted():
    micro_batches = tuple(MicroBatch((Segment(document, 0, 8),), 1.0) for document in range(1033))
    table = shown(StepPlan(0, (micro_batches,)))
    assert len(table.rows) == 32
    assert table.text.endswith("and 1,001 more")


@pytest.mark.parametrize("page", ["#ffffff", "#1e1e1e", "#111111"])
def test_bars_are_seen_on_light_and_on_dark(page: str):
    """With the contrast of 3 to 1 that WCAG 2.1 (1.4.11) wants of graphics."""

    def luminance(colour: str) -> float:
        values = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
        return float(np.dot((0.2126, 0.7152, 0.0722), linear))

    for colour in COLOURS.values():
        low, high = sorted((luminance(colour), luminance(page)))
        assert (high + 0.05) / (low + 0.05) >= 3, colour
