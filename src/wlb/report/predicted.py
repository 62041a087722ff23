"""The report on document lengths: what a job would lose today and what each remedy would give."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wlb.documents.lengths import what_was_read
from wlb.errors import UserError
from wlb.markup import Markup, join, tag
from wlb.report.answer import about, columns_of
from wlb.report.evidence import Evidence
from wlb.report.gain import Gain
from wlb.report.html.charts import bars, intervals, length_histogram
from wlb.report.html.diagrams import heat_map, pipeline_chart, shard_chart
from wlb.report.html.markup import Caption, table
from wlb.report.html.page import code, facts, page, paragraph, section, verdict
from wlb.report.plots import is_baseline
from wlb.simulate import simulate_step
from wlb.simulate.timeline import Timeline
from wlb.simulate.verdict import BASELINE, BEST, ELASTIC, PARTS, Verdict

TITLE = "What workload balancing gives this job"

_THE_STEP = "Of each system the step whose seconds for its work are closest to the mean"


def predicted_report(evidence: Evidence, *, source: str, rivals: dict[str, Any] | None = None) -> str:
    """The HTML of a report on ``evidence``; ``source`` names the lengths.

    ``rivals`` is what ``wlb rivals --json`` printed, for a section of its own.
    """
    judged, name = evidence.verdict, evidence.shown
    before, after = evidence.systems[BASELINE], evidence.systems[name]
    low, high = judged.spread(name)
    values = {
        f"speed at equal work, {name} over {BASELINE} ({low:.2f} to {high:.2f})": f"{judged.speed(name):.2f}x",
        "slowest over mean GPU, compute of a step": f"{before.imbalance['gpus']:.2f} → {after.imbalance['gpus']:.2f}",
        f"token delay of {name}, mean, in steps": f"{judged.token_delay(name):.2f}",
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
            section("packing", "Packing", *_packing(evidence)),
            section("where", "Where the time goes", where_chart(judged)),
            section("ranks", "Ranks", _ranks(evidence)),
            section(
                "pipeline",
                "Pipeline",
                step_chart({name: evidence.usual_steps[name] for name in (BASELINE, evidence.shown)}),
            ),
            section("sharding", "Sharding", _sharding(evidence)),
            *([] if rivals is None else [section("rivals", "Published policies", *rivals_shown(rivals))]),
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
    kept = {result.method: result.attention_kept for result in evidence.methods}["sequential"]
    judged, systems = evidence.verdict, evidence.systems
    caption = Caption(
        "gain-chart",
        f"Speed at equal work over {BASELINE}",
        f"Simulated. Dots: the median of {len(judged.draws)} draws of the documents; lines: the least and the most.",
    )
    others = [
        (name, Gain(judged.speed(name), *judged.spread(name), judged.steps)) for name in systems if name != BASELINE
    ]
    return [
        intervals(caption, others, f"times {BASELINE}"),
        table(columns_of(judged), f"Shares are of the time that {BASELINE} takes for the same work."),
        paragraph(
            "Speed at equal work: predicted seconds of work (W_a + W_l) of the documents trained, for each second of "
            f"the job. Tokens/s also rises with work left undone: {BASELINE} cuts documents at the window and computes "
            f"only {kept:.0%} of their attention, and documents still delayed after the last step are not trained.",
            class_="muted",
        ),
        paragraph(
            "The spread is that of the order of documents. It does not cover errors of the workload model, "
            "differences between machines, or what the simulation leaves out.",
            class_="muted",
        ),
    ]


def _packing(evidence: Evidence) -> list[Markup]:
    results = evidence.methods
    chart = bars(
        Caption("packing-chart", "Imbalance degree by packing method", "Simulated, on the same documents."),
        [(r.method, [r.imbalance_degree - 1], f"{r.imbalance_degree:.3f}") for r in results],
        "heaviest over mean micro-batch, by the prices packed by, mean over steps; 1 is perfect",
        origin=1.0,
        highlights=[r.method for r in results if not is_baseline(r.method)],
    )
    columns = {
        "method": [r.method for r in results],
        "imbalance": [f"{r.imbalance_degree:.3f}" for r in results],
        **{name: [f"{r.phase_imbalance[name]:.3f}" for r in results] for name in results[0].phase_imbalance},
        "token delay": [f"{r.mean_token_delay:.2f}" for r in results],
        "longest": [f"{r.longest_delay}" for r in results],
        "pipeline cost": [f"{r.as_packed.pipeline_cost:.3f}" for r in results],
        "arranged": [f"{r.arranged.pipeline_cost:.3f}" for r in results],
        "attention kept": [f"{r.attention_kept:.0%}" for r in results],
        "ms/step": [f"{r.planning_ms_per_step:.1f}" for r in results],
    }
    caption = (
        f"All methods are simulated in the job of {evidence.packed}. Token delay in steps. Pipeline cost: simulated "
        "step over a perfectly balanced one, micro-batches as packed, then with balanced assignment and order. "
        "ms/step: planning, measured on this machine."
    )
    return [chart, table(columns, caption)]


def where_chart(verdict: Verdict) -> Markup:
    """What the time of each system goes to."""
    parts = {name: verdict.parts(name) for name in verdict.systems}
    return bars(
        Caption(
            "where-chart",
            "Time for the same work, by cause",
            f"Simulated, mean over steps, as shares of {BASELINE}'s step. Causes are added one after another to a job "
            "without imbalance; 1 over the sum is the speed at equal work.",
        ),
        [
            (name, [max(0.0, share) for share in shares.values()], f"{sum(shares.values()):.3f}")
            for name, shares in parts.items()
        ],
        f"{BASELINE} = 1",
        parts=[*PARTS],
        show=lambda value: f"{value:.1%} of {BASELINE}'s step",
    )


def _ranks(evidence: Evidence) -> Markup:
    steps = {name: evidence.usual_steps[name] for name in (BASELINE, evidence.shown)}
    note = (
        f"{_THE_STEP}. Rows are pipeline ranks, columns context-parallel ranks within data-parallel ones; "
        "tensor-parallel ranks are alike. Red GPUs are the slowest; blue ones are idle until those have finished."
    )
    return heat_map(
        Caption("ranks-chart", "Compute of every GPU in one step", note),
        [(name, np.asarray(simulate_step(step.plan, step.job).gpu_seconds[0])) for name, step in steps.items()],
        "Simulated seconds of compute, without collectives and idle time",
    )


def step_chart(steps: Mapping[str, Timeline]) -> Markup:
    """One step of each system, on one clock."""
    note = (
        f"{_THE_STEP}; numbers are micro-batches. Where there are many ranks, the slowest data-parallel rank only; of "
        "level steps, in which every rank has its own micro-batches, the first ranks."
    )
    return pipeline_chart(
        Caption("pipeline-chart", "One step, before and after", note),
        [*steps.items()],
    )


def _sharding(evidence: Evidence) -> Markup:
    if not evidence.shards:
        return paragraph("Without context parallelism (cp = 1) nothing is sharded.")
    note = (
        "One micro-batch, the heaviest of the step above; the line is the mean rank. hybrid (in best) gives ranks with "
        "less attention more tokens, so its bars may differ while its seconds do not."
    )
    return shard_chart(Caption("sharding-chart", "Attention of every context-parallel rank", note), evidence.shards)


def read_rivals(path: Path) -> dict[str, Any]:
    """What ``wlb rivals --json`` printed. Raises ``UserError`` for a file that is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found["policies"][0]["speed_at_equal_work"]
    except OSError as error:
        raise UserError(f"rivals {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise UserError(f"rivals {path} is not what wlb rivals --json prints; write it anew") from None
    return found


def rivals_shown(found: Mapping[str, Any]) -> list[Markup]:
    """The chart and table of ``found``, which has the keys of ``wlb rivals --json``."""
    policies = found["policies"]
    speeds = [(p["policy"], [p["speed_at_equal_work"]], f"{p['speed_at_equal_work']:.2f}x") for p in policies]
    columns = {
        "policy": [p["policy"] for p in policies],
        "speed": [speed for _, _, speed in speeds],
        "token delay": [f"{p['token_delay']:.2f}" for p in policies],
        "tokens/step CV": [f"{p['tokens_cv']:.3f}" for p in policies],
        "exchange GB": [f"{p['exchanged_bytes'] / 1e9:.1f}" for p in policies],
        "peak GiB": [f"{p['memory_bytes'] / 2**30:.0f}" for p in policies],
        "planning s": [f"{p['planning_seconds']:.2f}" for p in policies],
        "layout": [p["layout"] for p in policies],
    }
    note = (
        f"Simulated, {policies[0]['steps']} steps of {found['model']} on {found['gpus']:,} {found['hardware']} GPUs "
        f"with a window of {found['context_window']:,}; lengths {found['lengths']}."
    )
    return [
        bars(
            Caption("rivals-chart", "Speed at equal work of published policies", note),
            speeds,
            "times plain-4d, each policy in its best layout",
            highlights=(BEST, ELASTIC),
        ),
        table(columns),
        paragraph(
            "We re-implemented each policy from its publication; docs/rivals.md has the sources. "
            "Planning seconds are measured on the machine that ran the comparison, all else is simulated.",
            class_="muted",
        ),
    ]


def _config(evidence: Evidence) -> list[Markup]:
    found = evidence.found
    if not found.config:
        return [paragraph("Keep what you have: no preset gains enough here to be worth a change.")]
    return [paragraph("With this, wlb simulate and wlb train --dry-run give the same speed."), code(found.config)]
