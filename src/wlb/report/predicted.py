"""The report on document lengths: what a job loses to imbalance, and how much faster each preset runs it."""

from wlb.report.answer import about, columns_of, note_on, too_few
from wlb.report.bootstrap import Gain
from wlb.report.evidence import Evidence
from wlb.report.html.charts import bars, intervals, length_histogram
from wlb.report.html.diagrams import pipeline_chart, shard_chart
from wlb.report.html.markup import Caption, Markup, table, tag
from wlb.report.html.page import facts, page, paragraph, section
from wlb.simulate.verdict import BASELINE, LOST, PARTS, Verdict


def predicted_report(evidence: Evidence, read: str) -> str:
    """The HTML of a report on ``evidence``; ``read`` says of what."""
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
    warnings = []
    if (passes := max(system.epochs for system in evidence.systems.values())) > 1:
        warnings.append(too_few(passes))
    if not evidence.fits:
        warnings.append(
            f"The memory model finds no room for a window of {before.job.context_window:,} tokens on these GPUs. The "
            "figures assume that it fits; recompute more activations, or raise cp, tp, pp or dp."
        )
    return page(
        "What workload balancing gives this job",
        [
            paragraph(judged.headline, class_="verdict"),
            paragraph(
                tag("span", "simulated", class_="label-simulated"),
                " Nothing here was measured on this job.",
                class_="muted",
            ),
            *map(paragraph, judged.reasons),
            *(paragraph(warning, class_="warning") for warning in warnings),
            facts(values),
            tag(
                "details",
                tag("summary", "What was read, simulated and taken as default"),
                *map(paragraph, [read, *about(evidence.found)]),
            ),
            section("gain", "Expected gain", *_gain(evidence)),
            section("where", "Where the time goes", _where(judged)),
            section("documents", "Documents", length_histogram(evidence.lengths)),
            section("pipeline", "Pipeline", _pipeline(evidence)),
            section("sharding", "Sharding", _sharding(evidence)),
            section("config", "Recommended configuration", *_config(evidence)),
        ],
    )


def lost_share(judged: Verdict, system: str) -> float:
    """The share of its own time that ``system`` loses to imbalance."""
    parts = judged.parts(system)
    return sum(max(0.0, parts[part]) for part in LOST) / sum(parts.values())


def _gain(evidence: Evidence) -> list[Markup]:
    judged, systems = evidence.verdict, evidence.systems
    caption = Caption(
        "gain-chart",
        f"Tokens per second over {BASELINE}",
        f"Simulated. Dots: {judged.draws} shuffles of the documents together. Lines: the lowest and highest.",
    )
    others = [(name, Gain(judged.speed(name), *judged.spread(name))) for name in systems if name != BASELINE]
    return [
        intervals(caption, others, f"times {BASELINE}"),
        table(columns_of(judged), note_on(judged)),
        paragraph(
            "The range comes from the order of the documents. It does not cover errors of the workload model, "
            "differences between machines, or effects that the simulator leaves out.",
            class_="muted",
        ),
    ]


def _where(verdict: Verdict) -> Markup:
    note = (
        f"Simulated, for as many tokens, as shares of the time of {BASELINE}. The simulator adds one cause after "
        "another to a job without imbalance."
    )
    parts = {name: [*verdict.parts(name).values()] for name in verdict.systems}
    rows = [(name, [max(0.0, share) for share in shares], f"{sum(shares):.3f}") for name, shares in parts.items()]
    return bars(Caption("where-chart", "Time of each system, by cause", note), rows, f"{BASELINE} = 1", [*PARTS])


def _pipeline(evidence: Evidence) -> Markup:
    note = (
        "The step of each system that is closest to its mean speed; numbers are micro-batches, reds are lost to "
        "imbalance. Context-parallel ranks exchange and wait layer by layer; both are drawn after the work of the mean "
        "rank. Large jobs show the slowest data-parallel rank only, or the first ranks where every rank has its own "
        "micro-batches."
    )
    steps = [(name, evidence.usual_steps[name]) for name in (BASELINE, evidence.shown)]
    return pipeline_chart(Caption("pipeline-chart", "One step, before and after", note), steps)


def _sharding(evidence: Evidence) -> Markup:
    if not evidence.shards:
        return paragraph("No ranks share a micro-batch (cp = 1), so nothing is sharded.")
    note = "A heavy micro-batch of the steps above; the line is the mean rank."
    return shard_chart(Caption("sharding-chart", "Attention of every context-parallel rank", note), evidence.shards)


def _config(evidence: Evidence) -> list[Markup]:
    found = evidence.found
    if not found.config:
        return [paragraph("Keep what you have: no preset gains enough here to be worth a change.")]
    return [
        paragraph("wlb simulate and wlb train --dry-run report the same speedup for it."),
        tag("pre", tag("code", found.config)),
    ]
