"""The report on a training job: what its ranks measured, alone or compared with an earlier job."""

from collections.abc import Sequence
from dataclasses import replace

from wlb.report.bootstrap import Gain, gain
from wlb.report.html.charts import intervals, series
from wlb.report.html.markup import Caption, Markup, table, tag
from wlb.report.html.page import facts, page, paragraph, section, verdict
from wlb.report.run_directory import TrainingRun
from wlb.terminal import number_of

TITLE = "What this training job loses to imbalance"
_IMBALANCE = (
    "If the plan is uneven, the predicted value is large too. If only the measured value is large, a machine is slow "
    "or the workload model does not fit: rank_seconds in steps.jsonl shows which rank is slow, and training.calibrate "
    "plans with measured costs. On GPUs measured seconds include the collectives inside a forward or backward pass."
)


def measured_report(run: TrainingRun, before: TrainingRun | None = None) -> str:
    """The HTML of a report on ``run``, compared with ``before`` if given."""
    before = before and _told_apart(before, run)
    runs = [run] if before is None else [before, run]
    values = {"a step, mean": _seconds(run.mean("step_seconds"))}
    values["slowest over mean rank, compute of a step"] = f"{run.mean('measured'):.2f}"
    values["model FLOPs utilisation"] = f"{run.utilisation:.1%}"
    values["tokens/s, all ranks"] = f"{run.tokens_per_second:,.0f}"
    gained = []
    if before is not None:
        faster = gain_in_tokens(before, run)
        over = f"tokens/s over {before.label} ({faster.low:.2f} to {faster.high:.2f})"
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
            section("imbalance", "Imbalance", paragraph(_IMBALANCE)),
        ],
    )


def conclusion(run: TrainingRun, before: TrainingRun | None = None) -> str:
    """How much ``run`` loses, or how it compares with ``before``, in one sentence."""
    if before is None:
        planned, measured = run.mean("predicted"), run.mean("measured")
        return (
            f"The slowest rank computes {measured:.2f} times as long as the mean rank; the plans predict {planned:.2f}."
        )
    faster, before = gain_in_tokens(before, run), _told_apart(before, run)
    sure = "" if not faster.low <= 1 <= faster.high else ", which is within the noise of these steps"
    return f"{run.label} trains {faster.factor:.2f}x the tokens per second of {before.label}{sure}."


def _told_apart(before: TrainingRun, run: TrainingRun) -> TrainingRun:
    return replace(before, name=f"{before.name} (before)") if before.name == run.name else before


def gain_in_tokens(before: TrainingRun, run: TrainingRun) -> Gain:
    """Compare tokens per second of all ranks."""
    seconds = "step_seconds"
    return gain(before.columns["tokens"], before.columns[seconds], run.columns["tokens"], run.columns[seconds])


def gain_at_equal_work(before: TrainingRun, run: TrainingRun) -> Gain:
    """Compare model FLOPs per second and device; unlike tokens/s, they do not rise if documents are cut or delayed."""
    return gain(before.work, before.columns["step_seconds"], run.work, run.columns["step_seconds"])


def _gain(before: TrainingRun, run: TrainingRun, faster: Gain) -> list[Markup]:
    drawn = "Dot: measured; line: 95% of a moving-block bootstrap over steps."
    caption = Caption("gain-chart", f"Tokens per second over {before.name}", drawn)
    return [
        intervals(caption, [(run.label, faster)], f"times {before.label}"),
        paragraph(
            f"At equal work (model FLOPs of the trained documents, per second and device) it is "
            f"{gain_at_equal_work(before, run)}: tokens/s also rise where documents are cut or still delayed."
        ),
        paragraph(
            "The interval covers the variation of steps inside these two runs. It does not cover differences between "
            "machines or between runs.",
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
        "slowest over mean rank, predicted": [f"{run.mean('predicted'):.3f}" for run in runs],
        "slowest over mean rank, measured": [f"{run.mean('measured'):.3f}" for run in runs],
        "imbalance degree (predicted)": [f"{run.mean('imbalance_degree'):.3f}" for run in runs],
        "token delay, steps": [f"{run.mean('token_delay'):.2f}" for run in runs],
        "data wait": [f"{run.mean('data_wait_seconds') / run.mean('step_seconds'):.1%}" for run in runs],
    }
    caption = Caption("steps-chart", "Model FLOPs utilisation, step by step", "Measured.")
    return [series(caption, lines[::-1], "model FLOPs utilisation"), table(columns)]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"
