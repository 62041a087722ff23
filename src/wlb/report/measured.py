"""The report on a training job: what its ranks measured, alone or beside an earlier job."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wlb.report.charts import intervals, series, stacked
from wlb.report.gain import gain
from wlb.report.heat_map import heat_map
from wlb.report.markup import Markup, join, table, tag
from wlb.report.page import facts, page, paragraph, section
from wlb.report.run_directory import TrainingRun

TITLE = "What this training job loses to imbalance"

_DIMENSIONS = {
    "tp": "tensor-parallel ranks",
    "cp": "context-parallel ranks",
    "pp": "pipeline stages",
    "dp": "data-parallel ranks",
    "micro_batches": "micro-batches of a pipeline",
}
_PARTS = ("compute of the mean rank", "waiting for the slowest rank", "data", "everything else")


def measured_report(run: TrainingRun, before: TrainingRun | None = None) -> str:
    """The HTML of a report on ``run``, compared with ``before`` if that is given."""
    runs = [run] if before is None else [before, run]
    values = [
        (f"{run.tokens_per_second:,.0f}", "tokens/s, all ranks"),
        (f"{np.median(run.columns['step_seconds']):.3g} s", "a step, median"),
        (f"{run.mean('mfu'):.1%}", "model FLOPs utilisation"),
    ]
    if run.diagnosis is not None:
        values.insert(1, (f"{run.diagnosis['slowest_over_mean']:.2f}", "slowest over mean rank, compute of a step"))
    steps = len(run.columns["step"])
    return page(
        TITLE,
        [
            paragraph(
                tag("span", "measured", class_="label-measured"),
                f" by the job itself: {run.name}, {steps} steps up to step {run.columns['step'][-1]:.0f}"
                + ("." if before is None else f", beside {before.name}, {len(before.columns['step'])} steps."),
                class_="muted",
            ),
            facts(values),
            *([] if before is None else [section("gain", "Gain", *_gain(before, run))]),
            section("steps", "Steps", *_steps(runs)),
            section("where", "Where the time goes", *_where(runs)),
            section("ranks", "Ranks", *_ranks(runs)),
            section("causes", "Causes", *_causes(run)),
        ],
    )


def _gain(before: TrainingRun, run: TrainingRun) -> list[Markup]:
    first, second = before.columns, run.columns
    result = gain(
        first["tokens"].astype(np.int64),
        first["step_seconds"],
        second["tokens"].astype(np.int64),
        second["step_seconds"],
    )
    return [
        intervals(
            "gain-chart",
            f"Tokens per second over {before.name}",
            [(_shortened(run.name), result)],
            f"times {_shortened(before.name)}",
            f"Dot: measured; line: 95% of a moving-block bootstrap over {result.steps} steps.",
        ),
        paragraph(
            "The interval covers how much steps differ inside these two runs. It does not cover differences between "
            "machines, or between one run and the next.",
            class_="muted",
        ),
    ]


def _steps(runs: Sequence[TrainingRun]) -> list[Markup]:
    classes = ["after"] if len(runs) == 1 else ["before", "after"]
    lines = [
        (_shortened(run.name), class_, run.columns["step"], run.columns["tokens"] / run.columns["step_seconds"])
        for run, class_ in zip(runs, classes, strict=True)
    ]
    rows = [
        (
            run.name,
            f"{run.tokens_per_second:,.0f}",
            f"{run.mean('step_seconds'):.3g}",
            f"{run.mean('imbalance_degree'):.3f}",
            f"{run.mean('token_delay'):.2f}",
            f"{run.mean('data_wait_seconds') / run.mean('step_seconds'):.1%}",
        )
        for run in runs
    ]
    headings = ("run", "tokens/s", "step, s", "imbalance degree (predicted)", "token delay, steps", "waiting for data")
    return [
        series("steps-chart", "Tokens per second, step by step", lines, "tokens per second", "Measured."),
        table(headings, rows),
    ]


def _where(runs: Sequence[TrainingRun]) -> list[Markup]:
    diagnosed = [(run.name, run.diagnosis) for run in runs if run.diagnosis is not None]
    if not diagnosed:
        return [_not_diagnosed()]
    bars = []
    for name, diagnosis in diagnosed:
        mean, step = diagnosis["mean_compute_seconds"], diagnosis["step_seconds"]
        waiting = mean * (diagnosis["slowest_over_mean"] - 1)
        data = max(rank["data_wait_seconds"] for rank in diagnosis["ranks"])
        rest = max(0.0, step - mean - waiting - data)
        bars.append((_shortened(name), (mean, waiting, data, rest), f"{step:.3g} s"))
    chart = stacked(
        "where-chart",
        "Seconds of a step",
        bars,
        _PARTS,
        "seconds",
        f"Measured, mean of the last {diagnosed[-1][1]['steps']} steps that were diagnosed. Everything else is "
        "bubbles of the pipeline, communication and the optimizer.",
        lambda seconds: f"{seconds:.3g} s",
    )
    rows = [
        (label, *(_factor(d["imbalance"].get(name), kind) for _, d in diagnosed for kind in ("predicted", "measured")))
        for name, label in _DIMENSIONS.items()
    ]
    headings = [
        "slowest over mean",
        *(f"{name}, {kind}" for name, _ in diagnosed for kind in ("predicted", "measured")),
    ]
    return [chart, table(headings, rows)]


def _ranks(runs: Sequence[TrainingRun]) -> list[Markup]:
    panels = [(_shortened(run.name), run.compute_seconds) for run in runs if run.compute_seconds is not None]
    if not panels:
        return [_not_diagnosed()]
    return [
        heat_map(
            "ranks-chart",
            "Compute of every GPU",
            [(name, seconds) for name, seconds in panels if seconds is not None],
            "Measured seconds of compute in a step, without collectives and waiting",
            "Rows are pipeline ranks, columns context-parallel ranks within data-parallel ones; of a tensor-parallel "
            "group the slowest rank. Blue ranks wait for red ones.",
        )
    ]


def _causes(run: TrainingRun) -> list[Markup]:
    if run.diagnosis is None:
        return [_not_diagnosed()]
    causes = [str(cause["text"]) for cause in run.diagnosis["causes"]]
    if not causes:
        return [paragraph("No cause costs 2% of a step or more.")]
    return [
        paragraph("Costliest first, as the job diagnosed itself, with what to do about each."),
        tag("ol", join(tag("li", cause) for cause in causes)),
    ]


def _not_diagnosed() -> Markup:
    return paragraph(
        "The job has written no diagnosis.json yet: it does every metrics.diagnose_every steps and at its end."
    )


def _factor(factor: dict[str, float | None] | None, kind: str) -> str:
    value = (factor or {}).get(kind)
    return "" if value is None else f"{value:.3f}"


def _shortened(name: str, most: int = 22) -> str:
    """A name that fits beside a bar."""
    return name if len(name) <= most else name[: most - 1] + "…"
