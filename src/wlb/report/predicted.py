"""The report on document lengths: what a job loses to imbalance, and how much faster each preset runs it."""

from collections.abc import Mapping

from wlb.documents.lengths import what_was_read
from wlb.report.answer import about, columns_of, note_on, too_few
from wlb.report.bootstrap import Gain
from wlb.report.evidence import Evidence
from wlb.report.html.charts import bars, intervals, length_histogram
from wlb.report.html.diagrams import pipeline_chart, shard_chart
from wlb.report.html.markup import Caption, Markup, table, tag
from wlb.report.html.page import code, facts, folded, page, paragraph, section, verdict, warning
from wlb.report.timeline import Timeline
from wlb.simulate.verdict import BASELINE, LOST, PARTS, Verdict

TITLE = "What workload balancing gives this job"


def predicted_report(evidence: Evidence, *, source: str) -> str:
    """The HTML of a report on ``evidence``; ``source`` names the lengths."""
    judged, name = evidence.verdict, evidence.shown
    before, after = evidence.systems[BASELINE], evidence.systems[name]
    low, high = judged.spread(name)
    lost = " → ".join(f"{lost_share(judged, system):.0%}" for system in (BASELINE, name))
    values = {
        f"tokens/s of {name} over {BASELINE} ({low:.2f} to {high:.2f})": f"{judged.speed(name):.2f}x",
        f"time lost to imbalance, {BASELINE} → {name}": lost,
        f"tokens/s of {name}; of {BASELINE} {before.tokens_per_second:,.0f}": f"{after.tokens_per_second:,.0f}",
        f"mean token delay of {name}, steps": f"{judged.systems[name].token_delay:.2f}",
    }
    passes = max(system.epochs for system in evidence.systems.values())
    read = what_was_read(source, evidence.lengths, before.job.context_window)
    return page(
        TITLE,
        [
            verdict(judged.headline),
            paragraph(
                tag("span", "simulated", class_="label-simulated"),
                " Nothing here was measured on this job.",
                class_="muted",
            ),
            *map(paragraph, judged.reasons),
            *([warning(too_few(passes))] if passes > 1 else []),
            *([] if evidence.fits else [_does_not_fit(evidence)]),
            facts(values),
            folded("What was read, simulated and taken as default", [read, *about(evidence.found)]),
            section("gain", "Expected gain", *_gain(evidence)),
            section("where", "Where the time goes", where_chart(judged)),
            section("documents", "Documents", length_histogram(evidence.lengths)),
            section(
                "pipeline",
                "Pipeline",
                step_chart({name: evidence.usual_steps[name] for name in (BASELINE, evidence.shown)}),
            ),
            section("sharding", "Sharding", _sharding(evidence)),
            section("config", "Recommended configuration", *_config(evidence)),
        ],
    )


def lost_share(judged: Verdict, system: str) -> float:
    """The share of its own time that ``system`` loses to imbalance."""
    parts = judged.parts(system)
    return sum(max(0.0, parts[part]) for part in LOST) / sum(parts.values())


def _does_not_fit(evidence: Evidence) -> Markup:
    return warning(
        f"The memory model finds no room for a window of {evidence.systems[BASELINE].job.context_window:,} tokens on "
        "these GPUs. The figures assume that it fits; recompute more activations, or raise cp, tp, pp or dp."
    )


def _gain(evidence: Evidence) -> list[Markup]:
    judged, systems = evidence.verdict, evidence.systems
    caption = Caption(
        "gain-chart",
        f"Tokens per second over {BASELINE}",
        f"Simulated. Dots: {judged.draws} shuffles of the documents together. Lines: the lowest and highest.",
    )
    others = [
        (name, Gain(judged.speed(name), *judged.spread(name), judged.steps)) for name in systems if name != BASELINE
    ]
    return [
        intervals(caption, others, f"times {BASELINE}"),
        table(columns_of(judged), note_on(judged)),
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
            "Time of each system, by cause",
            f"Simulated, for as many tokens, as shares of the time of {BASELINE}. The simulator adds one cause after "
            "another to a job without imbalance.",
        ),
        [
            (name, [max(0.0, share) for share in shares.values()], f"{sum(shares.values()):.3f}")
            for name, shares in parts.items()
        ],
        f"{BASELINE} = 1",
        [*PARTS],
    )


def step_chart(steps: Mapping[str, Timeline]) -> Markup:
    """One step of each system, on one clock."""
    note = (
        "The step of each system that is closest to its mean speed; numbers are micro-batches, reds are lost to "
        "imbalance. Context-parallel ranks exchange and wait layer by layer; both are drawn after the work of the mean "
        "rank. Large jobs show the slowest data-parallel rank only, or the first ranks where every rank has its own "
        "micro-batches."
    )
    return pipeline_chart(
        Caption("pipeline-chart", "One step, before and after", note),
        [*steps.items()],
    )


def _sharding(evidence: Evidence) -> Markup:
    if not evidence.shards:
        return paragraph("No ranks share a micro-batch (cp = 1), so nothing is sharded.")
    note = "A heavy micro-batch of the steps above; the line is the mean rank."
    return shard_chart(Caption("sharding-chart", "Attention of every context-parallel rank", note), evidence.shards)


def _config(evidence: Evidence) -> list[Markup]:
    found = evidence.found
    if not found.config:
        return [paragraph("Keep what you have: no preset gains enough here to be worth a change.")]
    return [paragraph("wlb simulate and wlb train --dry-run report the same speedup for it."), code(found.config)]
