"""The report on a training job: what its ranks measured, alone or beside an earlier job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from wlb.report.gain import Gain, gain
from wlb.report.html.charts import bars, intervals, series
from wlb.report.html.diagrams import heat_map
from wlb.report.html.escaping import Markup, join, tag
from wlb.report.html.markup import Caption, table
from wlb.report.html.page import facts, page, paragraph, section, verdict
from wlb.report.run_directory import TrainingRun
from wlb.terminal import number_of

TITLE = "What this training job loses to imbalance"

_DIMENSIONS = {
    "tp": "tensor-parallel ranks",
    "cp": "context-parallel ranks",
    "pp": "pipeline stages",
    "dp": "data-parallel ranks",
    "micro_batches": "micro-batches of a pipeline",
}
_PARTS = ("compute of the mean rank", "wait for a core", "idle until the slowest rank", "data wait", "everything else")


def measured_report(run: TrainingRun, before: TrainingRun | None = None) -> str:
    """The HTML of a report on ``run``, compared with ``before`` if that is given."""
    before = before and _told_apart(before, run)
    runs = [run] if before is None else [before, run]
    values = {"a step, mean": _seconds(run.mean("step_seconds"))}
    if run.diagnosis is not None:
        slowest = run.diagnosis["slowest_over_mean"]
        values["slowest over mean rank, compute of a step"] = f"{slowest:.2f}"
    values["model FLOPs utilisation"] = f"{run.utilisation:.1%}"
    values["tokens/s, all ranks"] = f"{run.tokens_per_second:,.0f}"
    gained = []
    if before is not None:
        faster = gain_at_equal_work(before, run)
        over = f"speed at equal work, over {before.label} ({faster.low:.2f} to {faster.high:.2f})"
        values = {over: f"{faster.factor:.2f}x"} | values
        gained = [section("gain", "Gain", *_gain(before, run, faster))]
    covered = ", beside ".join(
        f"{one.name}, {number_of(one.steps, 'step')} from step {one.columns['step'][0]:.0f} to "
        f"{one.columns['step'][-1]:.0f}"
        for one in reversed(runs)
    )
    return page(
        TITLE,
        [
            verdict(conclusion(run, before)),
            paragraph(
                tag("span", "measured", class_="label-measured"),
                f" by the job itself: {covered}. All means are over these steps.",
                class_="muted",
            ),
            facts(values),
            *gained,
            section("steps", "Steps", *_steps(runs)),
            section("where", "Where the time goes", *_where(runs)),
            section("ranks", "Ranks", *_ranks(runs)),
            section("causes", "Causes", *_causes(run)),
        ],
    )


def conclusion(run: TrainingRun, before: TrainingRun | None = None) -> str:
    """In a sentence: what ``run`` loses, or how it compares with ``before``."""
    if before is None:
        return _verdict(run)
    return _compared(run, _told_apart(before, run), gain_at_equal_work(before, run))


def _told_apart(before: TrainingRun, run: TrainingRun) -> TrainingRun:
    return replace(before, name=f"{before.name} (before)") if before.name == run.name else before


def _verdict(run: TrainingRun) -> str:
    if run.diagnosis is None:
        return f"Steps take {_seconds(run.mean('step_seconds'))} on average; the job has not been diagnosed yet."
    diagnosis = run.diagnosis
    lost = diagnosis["mean_compute_seconds"] * (diagnosis["slowest_over_mean"] - 1) / diagnosis["step_seconds"]
    return f"On average, ranks sit idle for {lost:.0%} of each step, waiting for the slowest one."


def _compared(run: TrainingRun, before: TrainingRun, faster: Gain) -> str:
    names = f"{run.label} does {faster.factor:.2f} times the work of {before.label}"
    sure = "" if not faster.low <= 1 <= faster.high else ", which is within the noise of these steps"
    return f"{names} in the same time{sure}."


def gain_at_equal_work(before: TrainingRun, run: TrainingRun) -> Gain:
    """Model FLOPs in a second of each device: unlike tokens/s, they do not rise while documents are cut or wait."""
    return gain(before.work, before.columns["step_seconds"], run.work, run.columns["step_seconds"])


def _gain(before: TrainingRun, run: TrainingRun, faster: Gain) -> list[Markup]:
    drawn = "Dot: measured; line: 95% of a moving-block bootstrap over steps."
    caption = Caption("gain-chart", f"Speed at equal work over {before.name}", drawn)
    return [
        intervals(caption, [(run.label, faster)], f"times {before.label}"),
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
    lines = [
        (run.label, class_, run.columns["step"], run.columns["mfu"])
        for run, class_ in zip(reversed(runs), ("after", "before"), strict=False)
    ]
    columns = {
        "run": [run.name for run in runs],
        "steps": [f"{run.steps}" for run in runs],
        "a step, mean": [_seconds(run.mean("step_seconds")) for run in runs],
        "model FLOPs utilisation": [f"{run.utilisation:.1%}" for run in runs],
        "tokens/s": [f"{run.tokens_per_second:,.0f}" for run in runs],
        "imbalance degree (predicted)": [f"{run.mean('imbalance_degree'):.3f}" for run in runs],
        "token delay, steps": [f"{run.mean('token_delay'):.2f}" for run in runs],
        "data wait": [f"{run.mean('data_wait_seconds') / run.mean('step_seconds'):.1%}" for run in runs],
    }
    caption = Caption("steps-chart", "Model FLOPs utilisation, step by step", "Measured.")
    return [series(caption, lines[::-1], "model FLOPs utilisation"), table(columns)]


def _where(runs: Sequence[TrainingRun]) -> list[Markup]:
    diagnosed = [(run, run.diagnosis) for run in runs if run.diagnosis is not None]
    if not diagnosed:
        return [_not_diagnosed()]
    rows = []
    for run, diagnosis in diagnosed:
        mean, step = diagnosis["mean_compute_seconds"], diagnosis["step_seconds"]
        waiting = mean * (diagnosis["slowest_over_mean"] - 1)
        data = max(rank["data_wait_seconds"] for rank in diagnosis["ranks"])
        core = fmean(rank["core_wait_seconds"] for rank in diagnosis["ranks"])  # of the compute seconds
        rest = max(0.0, step - mean - waiting - data)
        seconds = run.mean("step_seconds")
        rows.append(
            (run.label, [seconds * part / step for part in (mean - core, core, waiting, data, rest)], _seconds(seconds))
        )
    note = (
        f"Measured: a run's mean step, divided as its last diagnosed steps were ({_diagnosed(runs)}). Everything else "
        "is bubbles of the pipeline, communication and the optimizer."
    )
    chart = bars(Caption("where-chart", "Seconds of a step", note), rows, "seconds", parts=_PARTS, show=_seconds)
    columns = {"slowest over mean": [*_DIMENSIONS.values()]} | {
        f"{run.name}, {kind}": [_factor(diagnosis["imbalance"][name][kind]) for name in _DIMENSIONS]
        for run, diagnosis in diagnosed
        for kind in ("predicted", "measured")
    }
    return [chart, table(columns, "Of the diagnosed steps.")]


def _diagnosed(runs: Sequence[TrainingRun]) -> str:
    """Which steps the diagnoses cover, run after run."""
    return "; ".join(run.diagnosed for run in runs if run.diagnosis is not None)


def _ranks(runs: Sequence[TrainingRun]) -> list[Markup]:
    panels = [(run.label, run.compute_seconds) for run in runs if run.compute_seconds is not None]
    if not panels:
        return [_not_diagnosed()]
    note = (
        f"Mean of the last diagnosed steps ({_diagnosed(runs)}). Rows are pipeline ranks, columns context-parallel "
        "ranks within data-parallel ones; of a tensor-parallel group the slowest rank. Red ranks are the slowest; "
        "blue ones are idle until those have finished. Waiting for a core that other processes have counts as compute."
    )
    unit = "Measured seconds of compute in a step, without collectives and idle time"
    return [heat_map(Caption("ranks-chart", "Compute of every rank", note), panels, unit)]


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


def _factor(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"
