"""The simulator against published measurements: every row of a table, summaries, and one picture.

Nothing is fitted here and no row is left out: a row that cannot be simulated has a reason.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from wlb_studies.experiment import Column, Report, Settings, Table
from wlb_studies.plots import pyplot_without_display, save
from wlb_studies.published.batches import measured_batch_rows
from wlb_studies.published.kernels import kernel_rows
from wlb_studies.published.pipeline_stages import stage_rows
from wlb_studies.published.prediction import FUNCTIONAL, Prediction, Summary, compared, summaries
from wlb_studies.published.ratios import SystemRatio, ratio_summaries, system_ratios
from wlb_studies.published.reading import read_measurements
from wlb_studies.published.samplers import is_sampled, sampled_row
from wlb_studies.published.whole_steps import whole_step_row

_GROUPS = {
    "table": "by table",
    "kind": "whole steps and pipeline stages, by kind",
    "missing": "whole steps, by the first thing that their predictions lack",
    "run": "measured batches, by run",
}
_BAND = 0.2


def run(settings: Settings) -> Report:
    """The report on ``settings.measured``, or on the project's own table."""
    document = read_measurements(settings.measured)
    predictions = predicted_rows(document)
    left_out = Counter(one.left_out for one in predictions if one.left_out)
    grouped = {by: summaries(predictions, by) for by in _GROUPS}
    ratios = system_ratios(document["rows"], predictions)
    return Report(
        title="Published measurements, and what the simulator predicts for them",
        documents=str(settings.measured or "as published; sources are in each row"),
        tables=[
            *(_table(_GROUPS[by], by, of_one) for by, of_one in grouped.items() if of_one),
            *_systems(ratios),
            *_without_prediction(predictions),
        ],
        draw=partial(_draw, predictions),
        notes=[
            "error: predicted over measured seconds of a step (or kernel), minus one; slope: measured over predicted",
            "the JSON lists the assumptions of each row where its publication is silent",
            *(f"left out of statistics, {count} rows: {reason}" for reason, count in left_out.items()),
        ],
        more={
            "rows": [asdict(one) for one in predictions],
            "ratios": [one._asdict() for one in ratios],
            "summaries": [asdict(one) for of_one in grouped.values() for one in of_one],
        },
    )


def predicted_rows(document: dict[str, Any]) -> list[Prediction]:
    """A prediction or a reason for everything in a document: rows in order, then stages, kernels and runs."""
    return [
        *(sampled_row(row) if is_sampled(row) else whole_step_row(row) for row in document["rows"]),
        *stage_rows(document["rows"]),
        *kernel_rows(document),
        *measured_batch_rows(document),
    ]


def _table(title: str, by: str, grouped: Sequence[Summary]) -> Table:
    """Rows without a prediction have no kind and lack nothing, so only other tables count them."""
    published = by in ("table", "run")
    columns = (
        Column(by),
        *([Column("rows", "", ",.0f")] if published else []),
        Column("compared", "", ",.0f"),
        Column("median error", "simulated", "+.1%"),
        Column("median absolute", "simulated", ".1%"),
        Column("worst", "simulated", "+.1%"),
        Column("bias", "simulated", "+.1%"),
        Column("correlation", "simulated", ".3f"),
        Column("slope", "simulated", ".2f"),
    )
    rows = [
        (
            *((one.name, one.rows) if published else (one.name,)),
            *(one.count, one.median_error, one.median_absolute_error, one.worst_error),
            *(one.bias, one.correlation, one.slope),
        )
        for one in grouped
    ]
    return Table(title, columns, [*rows])


def _systems(ratios: Sequence[SystemRatio]) -> list[Table]:
    if not ratios:
        return []
    columns = (
        *(Column("kind"), Column("run"), Column("system"), Column("over run"), Column("its system")),
        Column("steps", "", ",.0f"),
        *(Column("seconds over its, measured", "quoted", ".3f"), Column("predicted", "simulated", ".3f")),
    )
    points = [Column(name, "simulated", "+.1f") for name in ("median, points", "median absolute", "worst")]
    summary = (Column("kind"), Column("pairs", "", ",.0f"), *points)
    return [
        Table("systems beside each other", columns, [*ratios]),
        Table("predicted minus measured ratio of two systems", summary, [*ratio_summaries(ratios)]),
    ]


def _without_prediction(predictions: Sequence[Prediction]) -> list[Table]:
    reasons = Counter(one.reason for one in predictions if one.predicted_seconds is None)
    columns = (Column("reason"), Column("rows", "", ",.0f"))
    return [Table("without a prediction", columns, [*reasons.most_common()])] if reasons else []


def _draw(predictions: Sequence[Prediction], path: Path) -> None:
    pyplot = pyplot_without_display()
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    figure, axis = pyplot.subplots(figsize=(9.0, 5.2), constrained_layout=True)
    sources: dict[str, list[tuple[float, float]]] = {}
    for one in predictions:
        source = one.source.partition(" ")[0] + (f", {FUNCTIONAL}" if one.kind == FUNCTIONAL else "")
        sources.setdefault(source, []).extend(compared([one]))
    sources = {source: pairs for source, pairs in sources.items() if pairs}
    colours = pyplot.get_cmap("tab10") if len(sources) <= 10 else pyplot.get_cmap("turbo", len(sources))
    axis.axhspan(1 - _BAND, 1 + _BAND, color="#b8bfc7", alpha=0.4, linewidth=0, zorder=0, label=f"±{_BAND:.0%}")
    axis.axhline(1.0, color="black", linewidth=0.8, zorder=0)
    for index, (source, pairs) in enumerate(sorted(sources.items(), key=lambda item: -len(item[1]))):
        measured, predicted = np.array(pairs).T
        axis.plot(measured, predicted / measured, "o", ms=3, alpha=0.6, mew=0, color=colours(index), label=source)
    axis.set(xscale="log", yscale="log", xlabel="measured, seconds", ylabel="predicted / measured")
    shortest, longest = axis.get_xlim()
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if longest < 1e3 * shortest else (1,), numticks=20))
    axis.yaxis.set_major_locator(FixedLocator([0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5]))
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter("{x:g}")
        scale.set_minor_locator(NullLocator())
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=1.8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title("published measurements, and what the simulator predicts", fontsize=10)
    save(figure, path)
