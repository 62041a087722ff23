"""The report on a training job: what its ranks measured, alone or beside an earlier job."""

from __future__ import annotations

from collections.abc import Sequence

from wlb.report.gain import Gain, gain
from wlb.report.html.charts import intervals, series, stacked
from wlb.report.html.diagrams import heat_map
from wlb.report.html.markup import Markup, join, table, tag
from wlb.report.html.page import facts, page, paragraph, section, verdict
from wlb.report.run_directory import TrainingRun

TITLE = "What this training job loses to imbalance"

_DIMENSIONS = {
    "tp": "tensor-parallel ranks",
    "cp": "context-parallel ranks",
    "pp": "pipeline stages",
    "dp": "data-parallel ranks",
    "micro_batches": "micro-batches of a pipeline",
}
_PARTS = ("compute of the mean rank", "idle until the slowest rank", "data wait", "everything else")


def measured_report(run: TrainingRun, before: TrainingRun | None = None) -> str:
    """The HTML of a report on ``run``, compared with ``before`` if that is given."""
    runs = [run] if before is None else [before, run]
    values = [
        (_seconds(run.mean("step_seconds")), "a step, mean"),
        (f"{run.utilisation:.1%}", "model FLOPs utilisation"),
        (f"{run.tokens_per_second:,.0f}", "tokens/s, all ranks"),
    ]
    if run.diagnosis is not None:
        values.insert(1, (f"{run.diagnosis['slowest_over_mean']:.2f}", "slowest over mean rank, compute of a step"))
    if before is not None:
        faster = gain_at_equal_work(before, run)
        values.insert(
            0,
            (
                f"{faster.factor:.2f}x",
                f"speed at equal work, over {_shortened(before.name)} ({faster.low:.2f} to {faster.high:.2f})",
            ),
        )
    return page(
        TITLE,
        [
            verdict(_verdict(run) if before is None else _compared(run, before, faster)),
            paragraph(
                tag("span", "measured", class_="label-measured"),
                f" by the job itself: {_covered(run)}"
                + ("" if before is None else f", beside {_covered(before)}")
                + ". All means are over these steps.",
                class_="muted",
            ),
            facts(values),
            *([] if before is None else [section("gain", "Gain", *_gain(before, run, faster))]),
            section("steps", "Steps", *_steps(runs)),
            section("where", "Where the time goes", *_where(runs)),
            section("ranks", "Ranks", *_ranks(runs)),
            section("causes", "Causes", *_causes(run)),
        ],
    )


def _verdict(run: TrainingRun) -> str:
    if run.diagnosis is None:
        return f"Steps take {_seconds(run.mean('step_seconds'))} on average; the job has not been diagnosed yet."
    diagnosis = run.diagnosis
    lost = diagnosis["mean_compute_seconds"] * (diagnosis["slowest_over_mean"] - 1) / diagnosis["step_seconds"]
    return f"The mean rank spends {lost:.0%} of a step idle until the slowest rank has computed as well."


def _compared(run: TrainingRun, before: TrainingRun, faster: Gain) -> str:
    names = f"{_shortened(run.name)} does {faster.factor:.2f} times the work of {_shortened(before.name)}"
    sure = "" if not faster.low <= 1 <= faster.high else ", which is within the noise of these steps"
    return f"{names} in the same time{sure}."


def gain_at_equal_work(before: TrainingRun, run: TrainingRun) -> Gain:
    """Model FLOPs in a second of each device: unlike tokens/s, they do not rise while documents are cut or wait."""
    return gain(before.work, before.columns["step_seconds"], run.work, run.columns["step_seconds"])


def _covered(run: TrainingRun) -> str:
    return f"{run.name}, {run.steps} steps from step {run.columns['step'][0]:.0f} to {run.columns['step'][-1]:.0f}"


def _gain(before: TrainingRun, run: TrainingRun, faster: Gain) -> list[Markup]:
    return [
        intervals(
            "gain-chart",
            f"Speed at equal work over {before.name}",
            [(_shortened(run.name), faster)],
            f"times {_shortened(before.name)}",
            "Dot: measured; line: 95% of a moving-block bootstrap over steps.",
        ),
        paragraph(
            "Speed at equal work counts the model FLOPs of what was trained in a second of each device (model FLOPs "
            f"utilisation). In tokens/s it is {run.tokens_per_second / before.tokens_per_second:.2f}x, which also "
            "rises where documents are cut or still delayed."
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
        (_shortened(run.name), class_, run.columns["step"], run.columns["mfu"])
        for run, class_ in zip(runs, classes, strict=True)
    ]
    rows = [
        (
            run.name,
            f"{run.steps}",
            _seconds(run.mean("step_seconds")),
            f"{run.utilisation:.1%}",
            f"{run.tokens_per_second:,.0f}",
            f"{run.mean('imbalance_degree'):.3f}",
            f"{run.mean('token_delay'):.2f}",
            f"{run.mean('data_wait_seconds') / run.mean('step_seconds'):.1%}",
        )
        for run in runs
    ]
    headings = (
        "run",
        "steps",
        "a step, mean",
        "model FLOPs utilisation",
        "tokens/s",
        "imbalance degree (predicted)",
        "token delay, steps",
        "data wait",
    )
    return [
        series("steps-chart", "Model FLOPs utilisation, step by step", lines, "model FLOPs utilisation", "Measured."),
        table(headings, rows),
    ]


def _where(runs: Sequence[TrainingRun]) -> list[Markup]:
    diagnosed = [(run, run.diagnosis) for run in runs if run.diagnosis is not None]
    if not diagnosed:
        return [_not_diagnosed()]
    bars = []
    for run, diagnosis in diagnosed:
        mean, step = diagnosis["mean_compute_seconds"], diagnosis["step_seconds"]
        waiting = mean * (diagnosis["slowest_over_mean"] - 1)
        data = max(rank["data_wait_seconds"] for rank in diagnosis["ranks"])
        rest = max(0.0, step - mean - waiting - data)
        seconds = run.mean("step_seconds")
        parts = [seconds * part / step for part in (mean, waiting, data, rest)]
        bars.append((_shortened(run.name), parts, _seconds(seconds)))
    chart = stacked(
        "where-chart",
        "Seconds of a step",
        bars,
        _PARTS,
        "seconds",
        f"Measured: a run's mean step, divided as its last diagnosed steps were ({_diagnosed(runs)}). Everything else "
        "is bubbles of the pipeline, communication and the optimizer.",
        _seconds,
    )
    rows = [
        (label, *(_factor(d["imbalance"].get(name), kind) for _, d in diagnosed for kind in ("predicted", "measured")))
        for name, label in _DIMENSIONS.items()
    ]
    headings = [
        "slowest over mean",
        *(f"{run.name}, {kind}" for run, _ in diagnosed for kind in ("predicted", "measured")),
    ]
    return [chart, table(headings, rows, "Of the diagnosed steps.")]


def _diagnosed(runs: Sequence[TrainingRun]) -> str:
    """Which steps the diagnoses cover, run after run."""
    return "; ".join(run.diagnosed for run in runs if run.diagnosis is not None)


def _ranks(runs: Sequence[TrainingRun]) -> list[Markup]:
    panels = [(_shortened(run.name), run.compute_seconds) for run in runs if run.compute_seconds is not None]
    if not panels:
        return [_not_diagnosed()]
    return [
        heat_map(
            "ranks-chart",
            "Compute of every rank",
            [(name, seconds) for name, seconds in panels if seconds is not None],
            "Measured seconds of compute in a step, without collectives and idle time",
            f"Mean of the last diagnosed steps ({_diagnosed(runs)}). Rows are pipeline ranks, columns context-parallel "
            "ranks within data-parallel ones; of a tensor-parallel group the slowest rank. Red ranks are the slowest; "
            "blue ones are idle until those have finished.",
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


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _shortened(name: str, most: int = 22) -> str:
    """A name that fits beside a bar."""
    return name if len(name) <= most else name[: most - 1] + "…"
