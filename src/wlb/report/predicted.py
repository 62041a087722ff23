"""The report on document lengths: what a job would lose today and what each remedy would give."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.job.memory.step import gib
from wlb.report.evidence import AS_FAST, BASELINE, BEST, ELASTIC, Evidence
from wlb.report.gain import Gain
from wlb.report.html.charts import bars, intervals, length_histogram, stacked
from wlb.report.html.diagrams import heat_map, pipeline_chart, shard_chart
from wlb.report.html.markup import Markup, table, tag
from wlb.report.html.page import code, facts, page, paragraph, section, verdict
from wlb.report.plots import is_baseline
from wlb.report.recommended import recommended_config
from wlb.report.rivals import rivals_section
from wlb.simulate import simulate_step
from wlb.simulate.timeline import Timeline

TITLE = "What workload balancing gives this job"

_FEW_STEPS = 16
_THE_STEP = "Of each system the step whose seconds for its work are closest to the mean"


def predicted_report(
    evidence: Evidence,
    *,
    source: str,
    model: str,
    hardware: str,
    store: str | None = None,
    rivals: dict[str, Any] | None = None,
) -> str:
    """The HTML of a report on ``evidence``; ``source`` names the lengths, ``store`` the token store they are of.

    ``rivals`` is what ``wlb rivals --json`` printed, for a section of its own.
    """
    job = evidence.job
    winner = evidence.winner
    gain = evidence.gains[winner]
    before, after = evidence.systems[BASELINE], evidence.systems[winner]
    layout = f"dp {job.layout.dp} · pp {job.layout.pp} · cp {job.layout.cp} · tp {job.layout.tp}"
    steps = after.steps
    return page(
        TITLE,
        [
            verdict(_verdict(evidence)),
            paragraph(
                tag("span", "simulated", class_="label-simulated"),
                f" from the lengths of {source}: {steps} steps of {model} on {job.layout.world_size:,} {hardware} GPUs "
                f"({layout}), window {job.context_window:,}, {job.packing.micro_batches} micro-batches a step. "
                "Nothing here was measured on this job.",
                class_="muted",
            ),
            facts(
                [
                    (
                        f"{gain.factor:.2f}x",
                        f"speed at equal work, {winner} over {BASELINE} ({gain.low:.2f} to {gain.high:.2f})",
                    ),
                    (
                        f"{before.imbalance['gpus']:.2f} → {after.imbalance['gpus']:.2f}",
                        "slowest over mean GPU, compute of a step",
                    ),
                    (f"{after.token_delay:.2f}", f"token delay of {winner}, mean, in steps"),
                    (f"{after.tokens_per_second:,.0f}", f"tokens/s of {winner}, all GPUs"),
                ]
            ),
            *([] if evidence.fits else [_does_not_fit(evidence)]),
            section("gain", "Expected gain", *_gain(evidence)),
            section("documents", "Documents", length_histogram(evidence.lengths)),
            section("packing", "Packing", *_packing(evidence)),
            section("where", "Where the time goes", _where(evidence)),
            section("ranks", "Ranks", _ranks(evidence)),
            section("pipeline", "Pipeline", _pipeline(evidence)),
            section("sharding", "Sharding", _sharding(evidence)),
            *([] if rivals is None else [section("rivals", "Published policies", *rivals_section(rivals))]),
            section("config", "Recommended configuration", *_config(evidence, model, source, store)),
        ],
    )


def _verdict(evidence: Evidence) -> str:
    winner = evidence.winner
    gain, delay = evidence.gains[winner], evidence.systems[winner].token_delay
    if gain.low <= 1.0:
        return f"On these documents balancing may gain nothing: {winner} is {gain} as fast as {BASELINE} at equal work."
    waits = "no document is delayed" if delay < 0.005 else f"a token is delayed by {delay:.2f} steps on average"
    return f"Preset {winner} does {gain.factor:.2f} times the work of {BASELINE} in the same time, and {waits}."


def _does_not_fit(evidence: Evidence) -> Markup:
    return paragraph(
        f"The memory model finds no room for micro-batches of {evidence.job.context_window:,} tokens on these GPUs, "
        "even with full activation checkpointing. The figures assume that it fits; raise cp, tp, pp or dp.",
        class_="warning",
    )


def _gain(evidence: Evidence) -> list[Markup]:
    kept = {result.method: result.attention_kept for result in evidence.methods}["sequential"]
    speeds, in_tokens = (
        {BASELINE: 1.0} | {name: one.factor for name, one in gains.items()}
        for gains in (evidence.gains, evidence.gains_in_tokens)
    )
    headings = ("preset", "speed at equal work", "tokens/s", f"over {BASELINE}", "token delay, steps")
    rows = [
        (
            name,
            f"{speeds[name]:.2f}x",
            f"{system.tokens_per_second:,.0f}",
            f"{in_tokens[name]:.2f}x",
            f"{system.token_delay:.2f}",
        )
        for name, system in evidence.systems.items()
    ]
    return [
        intervals(
            "gain-chart",
            f"Speed at equal work over {BASELINE}",
            list(evidence.gains.items()),
            f"times {BASELINE}",
            f"Dots: simulated; lines: 95% of a moving-block bootstrap over {evidence.systems[BEST].steps} steps.",
        ),
        *_doubts(evidence.winner, evidence.gains[evidence.winner]),
        table(headings, rows),
        paragraph(
            "Speed at equal work: predicted seconds of work (W_a + W_l) of the documents trained, for each second of "
            f"the job. Tokens/s also rises with work left undone: {BASELINE} cuts documents at the window and computes "
            f"only {kept:.0%} of their attention, and documents still delayed after the last step are not trained.",
            class_="muted",
        ),
        paragraph(
            "The interval covers the draw of documents only. It does not cover errors of the workload model, "
            "differences between machines, or what the simulation leaves out.",
            class_="muted",
        ),
    ]


def _doubts(winner: str, best: Gain) -> list[Markup]:
    doubts = []
    if best.low <= 1.0:
        doubts.append(
            f"The interval of {winner} reaches down to {BASELINE}: on these documents balancing may gain nothing."
        )
    if best.steps < _FEW_STEPS:
        doubts.append(f"Only {best.steps} steps were simulated, too few for an interval to be relied on.")
    return [paragraph(doubt, class_="warning") for doubt in doubts]


def _packing(evidence: Evidence) -> list[Markup]:
    results = evidence.methods
    chart = bars(
        "packing-chart",
        "Imbalance degree by packing method",
        [(r.method, r.imbalance_degree, f"{r.imbalance_degree:.3f}") for r in results],
        "heaviest over mean micro-batch, by the prices packed by, mean over steps; 1 is perfect",
        "Simulated, on the same documents.",
        origin=1.0,
        highlights=[r.method for r in results if not is_baseline(r.method)],
    )
    headings = (
        "method",
        "imbalance",
        "token delay",
        "longest",
        "pipeline cost",
        "arranged",
        "attention kept",
        "ms/step",
    )
    rows = [
        (
            r.method,
            f"{r.imbalance_degree:.3f}",
            f"{r.mean_token_delay:.2f}",
            f"{r.longest_delay}",
            f"{r.as_packed.pipeline_cost:.3f}",
            f"{r.arranged.pipeline_cost:.3f}",
            f"{r.attention_kept:.0%}",
            f"{r.planning_ms_per_step:.1f}",
        )
        for r in results
    ]
    caption = (
        "All methods are simulated in the job of best. Token delay in steps. Pipeline cost: simulated step over a "
        "perfectly balanced one, micro-batches as packed, then with balanced assignment and order. ms/step: planning, "
        "measured on this machine."
    )
    return [chart, table(headings, rows, caption)]


def _where(evidence: Evidence) -> Markup:
    baseline = evidence.systems[BASELINE]
    for_the_work = {
        name: {cause: seconds * system.steps / system.work_seconds for cause, seconds in system.where.items()}
        for name, system in evidence.systems.items()
    }
    unit = 1 / baseline.work_rate
    causes = [
        cause for cause in baseline.where if any(abs(where[cause]) >= 0.001 * unit for where in for_the_work.values())
    ]
    rows = [
        (name, [max(0.0, where[cause] / unit) for cause in causes], f"{sum(where.values()) / unit:.3f}")
        for name, where in for_the_work.items()
    ]
    return stacked(
        "where-chart",
        "Seconds for the same work, by cause",
        rows,
        causes,
        f"{BASELINE} = 1",
        "Simulated, mean over steps. Causes are added one after another to a job without imbalance; the sum is the "
        "step, and 1 over the sum is the speed at equal work.",
        lambda value: f"{value:.1%} of {BASELINE}'s step",
    )


def _ranks(evidence: Evidence) -> Markup:
    return heat_map(
        "ranks-chart",
        "Compute of every GPU in one step",
        [(name, _gpu_seconds(evidence.usual_steps[name])) for name in (BASELINE, evidence.winner)],
        "Simulated seconds of compute, without collectives and idle time",
        f"{_THE_STEP}. Rows are pipeline ranks, columns context-parallel ranks within data-parallel ones; "
        "tensor-parallel ranks are alike. Red GPUs are the slowest; blue ones are idle until those have finished.",
    )


def _gpu_seconds(step: Timeline) -> NDArray[np.float64]:
    return np.asarray(simulate_step(step.plan, step.job).gpu_seconds[0])


def _pipeline(evidence: Evidence) -> Markup:
    return pipeline_chart(
        "pipeline-chart",
        "One step, before and after",
        [(name, evidence.usual_steps[name]) for name in (BASELINE, evidence.winner)],
        f"{_THE_STEP}; numbers are micro-batches. Where there are many ranks, the slowest data-parallel rank only.",
    )


def _sharding(evidence: Evidence) -> Markup:
    if not evidence.shards:
        return paragraph("Without context parallelism (cp = 1) nothing is sharded.")
    return shard_chart(
        "sharding-chart",
        "Attention of every context-parallel rank",
        evidence.shards,
        "One micro-batch, the heaviest of the step above; the line is the mean rank. hybrid (in best) gives ranks with "
        "less attention more tokens, so its bars may differ while its seconds do not.",
    )


_TRIED = "Simulated. Speed is over the fastest; token delay in steps; memory of the worst step."


def _reason(winner: str) -> str:
    if winner == ELASTIC:
        return (
            f"{ELASTIC} is at least about as fast as {BEST} here and delays no document. Pools and their micro-batches "
            "are chosen when the job starts; activation checkpointing is the least with which an L_max of "
            f"{BEST} would fit."
        )
    return (
        f"{BEST} leaves L_max to choose: of those that fit the memory model and are within {AS_FAST:.0%} of the "
        "fastest, the one with the least delay. Activation checkpointing is the least that makes room."
    )


def _config(evidence: Evidence, model: str, source: str, store: str | None) -> list[Markup]:
    headings = ("L_max, windows", "speed at equal work", "token delay", "GiB of a GPU")
    rows = [
        (
            f"{one.max_length_factor:g}" + (" (recommended)" if one is evidence.recommended else ""),
            f"{one.speed:.3f}",
            f"{one.token_delay:.2f}",
            gib(one.memory_bytes),
        )
        for one in evidence.tried
    ]
    return [
        paragraph(_reason(evidence.winner)),
        *([table(headings, rows, _TRIED)] if evidence.winner == BEST else []),
        code(recommended_config(evidence.job, model, source, store, preset=evidence.winner)),
    ]
