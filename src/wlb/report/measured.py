"""The report on a training job: what its ranks measured, alone or compared with an earlier job."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from wlb.report.bootstrap import Gain, gain
from wlb.report.html.charts import intervals, series
from wlb.report.html.markup import Caption, Markup, table, tag
from wlb.report.html.page import facts, page, paragraph, section
from wlb.report.run_directory import TrainingRun
from wlb.terminal import number_of

_IMBALANCE = (
    "If the predicted and the measured value are large, the plan is uneven. If only the measured one is, a machine is "
    "slow or the workload model does not fit: rank_seconds in steps.jsonl shows which rank is slow, and "
    "training.calibrate plans with measured costs. On GPUs measured seconds include the collectives inside a forward "
    "or backward pass."
)


def measured_report(run: TrainingRun, before: TrainingRun | None = None) -> tuple[str, dict[str, Any]]:
    """The HTML of a report on ``run``, compared with ``before`` if given, and the figures of ``--json``."""
    found = {"kind": "measured", "steps": run.steps, "tokens_per_second": run.tokens_per_second}
    values = {
        "mean step": _seconds(run.mean("step_seconds")),
        "slowest over mean rank, compute of a step": f"{run.mean('measured'):.2f}",
        "model FLOPs utilisation": f"{run.utilisation:.1%}",
        "tokens/s, all ranks": f"{run.tokens_per_second:,.0f}",
    }
    runs, gained = [run], []
    conclusion = (
        f"The slowest rank computes {run.mean('measured'):.2f} times as long as the mean rank; the plans predict "
        f"{run.mean('predicted'):.2f}."
    )
    if before is not None:
        if before.name == run.name:
            before = replace(before, name=f"{before.name} (before)")
        runs, faster, equal = [before, run], gain_in_tokens(before, run), gain_at_equal_work(before, run)
        found |= {"speedup": faster.factor, "spread": (faster.low, faster.high), "speed_at_equal_work": equal.factor}
        over = f"tokens/s over {before.label} ({faster.low:.2f} to {faster.high:.2f})"
        values = {over: f"{faster.factor:.2f}x"} | values
        sure = "" if not faster.low <= 1 <= faster.high else ", which is within the noise of these steps"
        conclusion = f"{run.label} trains {faster.factor:.2f}x the tokens per second of {before.label}{sure}."
        gained = [section("gain", "Gain", *_gain(before, run, faster, equal))]
    covered = ", beside ".join(
        f"{one.name}, {number_of(one.steps, 'step')} from step {one.columns['step'][0]:.0f} to "
        f"{one.columns['step'][-1]:.0f}"
        for one in reversed(runs)
    )
    text = page(
        "What this training job loses to imbalance",
        [
            paragraph(conclusion, class_="verdict"),
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
    return text, found | {"verdict": conclusion}


def gain_in_tokens(before: TrainingRun, run: TrainingRun) -> Gain:
    """Compare tokens per second of all ranks."""
    seconds = "step_seconds"
    return gain(before.columns["tokens"], before.columns[seconds], run.columns["tokens"], run.columns[seconds])


def gain_at_equal_work(before: TrainingRun, run: TrainingRun) -> Gain:
    """Compare model FLOPs per second and device; unlike tokens/s, they do not rise if documents are cut or delayed."""
    return gain(before.work, before.columns["step_seconds"], run.work, run.columns["step_seconds"])


def _gain(before: TrainingRun, run: TrainingRun, faster: Gain, equal: Gain) -> list[Markup]:
    drawn = "Dot: measured; line: 95% of a moving-block bootstrap over steps."
    caption = Caption("gain-chart", f"Tokens per second over {before.name}", drawn)
    return [
        intervals(caption, [(run.label, faster)], f"times {before.label}"),
        paragraph(
            f"At equal work (model FLOPs of the trained documents, per second and device) it is {equal}: tokens/s also "
            "rise where documents are cut or still delayed."
        ),
        paragraph(
            "The interval covers the variation of steps inside these two runs. It does not cover differences between "
            "machines or between runs.",
            class_="muted",
        ),
    ]


def _steps(runs: Sequence[TrainingRun]) -> list[Markup]:
    lines = [
        (run.label, class_, run.columns["step"], 100 * run.columns["mfu"])
        for run, class_ in zip(reversed(runs), ("after", "before"), strict=False)
    ]
    columns = {
        "run": [run.name for run in runs],
        "steps": [f"{run.steps}" for run in runs],
        "mean step": [_seconds(run.mean("step_seconds")) for run in runs],
        "model FLOPs utilisation": [f"{run.utilisation:.1%}" for run in runs],
        "tokens/s": [f"{run.tokens_per_second:,.0f}" for run in runs],
        "slowest over mean rank, predicted": [f"{run.mean('predicted'):.3f}" for run in runs],
        "slowest over mean rank, measured": [f"{run.mean('measured'):.3f}" for run in runs],
        "imbalance degree (predicted)": [f"{run.mean('imbalance_degree'):.3f}" for run in runs],
        "token delay, steps": [f"{run.mean('token_delay'):.2f}" for run in runs],
        "data wait": [f"{run.mean('data_wait_seconds') / run.mean('step_seconds'):.1%}" for run in runs],
    }
    caption = Caption("steps-chart", "Model FLOPs utilisation in percent, step by step", "Measured.")
    return [series(caption, lines[::-1]), table(columns)]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"
