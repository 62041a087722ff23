"""The report on document lengths: what a job loses to imbalance, and how much faster each preset runs it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from wlb.documents.lengths import what_was_read
from wlb.report.answer import about, columns_of, note_on
from wlb.report.evidence import Evidence
from wlb.report.gain import Gain
from wlb.report.html.charts import bars, intervals, length_histogram
from wlb.report.html.diagrams import heat_map, pipeline_chart, shard_chart
from wlb.report.html.escaping import Markup, join, tag
from wlb.report.html.markup import Caption, table
from wlb.report.html.page import code, facts, page, paragraph, section, verdict
from wlb.report.timeline import Timeline
from wlb.simulate import simulate_step
from wlb.simulate.verdict import BASELINE, PARTS, Verdict

TITLE = "What workload balancing gives this job"

_THE_STEP = "The step of each system that is closest to its mean speed"


def predicted_report(evidence: Evidence, *, source: str) -> str:
    """The HTML of a report on ``evidence``; ``source`` names the lengths."""
    judged, name = evidence.verdict, evidence.shown
    before, after = evidence.systems[BASELINE], evidence.systems[name]
    low, high = judged.spread(name)
    values = {
        f"speedup of {name} over {BASELINE} ({low:.2f} to {high:.2f})": f"{judged.speed(name):.2f}x",
        "compute of a step, slowest / mean GPU": f"{before.imbalance['gpus']:.2f} → {after.imbalance['gpus']:.2f}",
        f"mean token delay of {name}, steps": f"{judged.token_delay(name):.2f}",
        f"tokens/s of {name}, all GPUs": f"{after.tokens_per_second:,.0f}",
    }
    read = what_was_read(source, evidence.lengths, before.job.context_window)
    return page(
        TITLE,
        [
            verdict(str(judged)),
            paragraph(
                tag("span", "simulated", class_="label-simulated"),
                " Nothing here was measured on this job.",
                *(join([tag("br"), line]) for line in (read, *about(evidence.found))),
                class_="muted",
            ),
            facts(values),
            *([] if evidence.fits else [_does_not_fit(evidence)]),
            section("gain", "Expected gain", *_gain(evidence)),
            section("documents", "Documents", length_histogram(evidence.lengths)),
            section("where", "Where the time goes", where_chart(judged)),
            section("ranks", "Ranks", _ranks(evidence)),
            section(
                "pipeline",
                "Pipeline",
                step_chart({name: evidence.usual_steps[name] for name in (BASELINE, evidence.shown)}),
            ),
            section("sharding", "Sharding", _sharding(evidence)),
            section("config", "Recommended configuration", *_config(evidence)),
        ],
    )


def _does_not_fit(evidence: Evidence) -> Markup:
    return paragraph(
        f"The memory model finds no room for a window of {evidence.systems[BASELINE].job.context_window:,} tokens on "
        "these GPUs, even with full activation checkpointing. The figures assume that it fits; raise cp, tp, pp or dp.",
        class_="warning",
    )


def _gain(evidence: Evidence) -> list[Markup]:
    judged, systems = evidence.verdict, evidence.systems
    caption = Caption(
        "gain-chart",
        f"Speedup over {BASELINE}",
        f"Simulated. Dots: the median of {len(judged.draws)} shuffles of the documents. Lines: the lowest and highest.",
    )
    others = [
        (name, Gain(judged.speed(name), *judged.spread(name), judged.steps)) for name in systems if name != BASELINE
    ]
    return [
        intervals(caption, others, f"times {BASELINE}"),
        table(columns_of(judged), note_on(judged)),
        paragraph(
            "Speedup compares the predicted work (W_a + W_l) of the trained documents per second. Tokens/s misleads: "
            f"{BASELINE} cuts documents at the window and skips part of their attention, and a system that delays "
            "documents has not trained all of them after the last step.",
            class_="muted",
        ),
        paragraph(
            "The range comes from the order of the documents. It does not cover errors of the workload model, "
            "differences between machines, or effects that the simulator leaves out.",
            class_="muted",
        ),
    ]


def where_chart(verdict: Verdict) -> Markup:
    """Where the time of each system goes."""
    parts = {name: verdict.parts(name) for name in verdict.systems}
    return bars(
        Caption(
            "where-chart",
            "Time for the same work, by cause",
            f"Simulated, mean over steps, as shares of the time of {BASELINE}. The simulator adds one cause after "
            "another to a job without imbalance. The speedup is 1 / sum.",
        ),
        [
            (name, [max(0.0, share) for share in shares.values()], f"{sum(shares.values()):.3f}")
            for name, shares in parts.items()
        ],
        f"{BASELINE} = 1",
        parts=[*PARTS],
        show=lambda value: f"{value:.1%} of the time of {BASELINE}",
    )


def _ranks(evidence: Evidence) -> Markup:
    steps = {name: evidence.usual_steps[name] for name in (BASELINE, evidence.shown)}
    note = (
        f"{_THE_STEP}. Rows are pipeline ranks, columns context-parallel ranks within data-parallel ones; "
        "tensor-parallel ranks are alike. Red GPUs are the slowest; blue ones wait for them."
    )
    return heat_map(
        Caption("ranks-chart", "Compute of every GPU in one step", note),
        [(name, np.asarray(simulate_step(step.plan, step.job).gpu_seconds[0])) for name, step in steps.items()],
        "Simulated seconds of compute, without collectives and idle time",
    )


def step_chart(steps: Mapping[str, Timeline]) -> Markup:
    """One step of each system, on one clock."""
    note = (
        f"{_THE_STEP}; numbers are micro-batches. Large jobs show the slowest data-parallel rank only, or the first "
        "ranks where every rank has its own micro-batches."
    )
    return pipeline_chart(
        Caption("pipeline-chart", "One step, before and after", note),
        [*steps.items()],
    )


def _sharding(evidence: Evidence) -> Markup:
    if not evidence.shards:
        return paragraph("Without context parallelism (cp = 1) nothing is sharded.")
    note = (
        "The heaviest micro-batch of the step above; the line is the mean rank. hybrid gives ranks with less attention "
        "more tokens, so its bars may differ while the ranks take equally long."
    )
    return shard_chart(Caption("sharding-chart", "Attention of every context-parallel rank", note), evidence.shards)


def _config(evidence: Evidence) -> list[Markup]:
    found = evidence.found
    if not found.config:
        return [paragraph("Keep what you have: no preset gains enough here to be worth a change.")]
    return [paragraph("wlb simulate and wlb train --dry-run report the same speedup for it."), code(found.config)]
