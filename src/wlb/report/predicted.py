"""The report on document lengths: what a job would lose today and what each remedy would give."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wlb.documents.store.reader import stored_vocab_size
from wlb.errors import UserError
from wlb.markup import Markup, tag
from wlb.report.evidence import Evidence
from wlb.report.gain import Gain
from wlb.report.html.charts import bars, intervals, length_histogram
from wlb.report.html.diagrams import heat_map, pipeline_chart, shard_chart
from wlb.report.html.markup import Caption, table
from wlb.report.html.page import code, facts, page, paragraph, section, verdict
from wlb.report.plots import is_baseline
from wlb.simulate import SimulatedJob, simulate_step
from wlb.simulate.search import layout_of
from wlb.simulate.timeline import Timeline
from wlb.simulate.verdict import BASELINE, BEST, ELASTIC, PARTS, Verdict
from wlb.workload import MODEL_SHAPES

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
    job, winner, model = evidence.job, evidence.winner, _measured_model(evidence.job) or model
    gain, before, after = evidence.gains[winner], evidence.systems[BASELINE], evidence.systems[winner]
    values = {
        f"speed at equal work, {winner} over {BASELINE} ({gain.low:.2f} to {gain.high:.2f})": f"{gain.factor:.2f}x",
        "slowest over mean GPU, compute of a step": f"{before.imbalance['gpus']:.2f} → {after.imbalance['gpus']:.2f}",
        f"token delay of {winner}, mean, in steps": f"{after.token_delay:.2f}",
        f"tokens/s of {winner}, all GPUs": f"{after.tokens_per_second:,.0f}",
    }
    return page(
        TITLE,
        [
            verdict(str(evidence.verdict)),
            paragraph(
                tag("span", "simulated", class_="label-simulated"),
                f" from the lengths of {source}: {after.steps} steps of {model} on {job.layout.world_size:,} "
                f"{hardware} GPUs ({layout_of(job)}), window {job.context_window:,}, {job.packing.micro_batches} "
                "micro-batches a step. Nothing here was measured on this job.",
                class_="muted",
            ),
            facts(values),
            *([] if evidence.fits else [_does_not_fit(evidence)]),
            section("gain", "Expected gain", *_gain(evidence)),
            section("documents", "Documents", length_histogram(evidence.lengths)),
            section("packing", "Packing", *_packing(evidence)),
            section("where", "Where the time goes", where_chart(evidence.verdict)),
            section("ranks", "Ranks", _ranks(evidence)),
            section(
                "pipeline",
                "Pipeline",
                step_chart({name: evidence.usual_steps[name] for name in (BASELINE, evidence.winner)}),
            ),
            section("sharding", "Sharding", _sharding(evidence)),
            *([] if rivals is None else [section("rivals", "Published policies", *rivals_shown(rivals))]),
            section("config", "Recommended configuration", *_config(evidence, model, source, store)),
        ],
    )


def _does_not_fit(evidence: Evidence) -> Markup:
    return paragraph(
        f"The memory model finds no room for micro-batches of {evidence.job.context_window:,} tokens on these GPUs, "
        "even with full activation checkpointing. The figures assume that it fits; raise cp, tp, pp or dp.",
        class_="warning",
    )


def _gain(evidence: Evidence) -> list[Markup]:
    kept = {result.method: result.attention_kept for result in evidence.methods}["sequential"]
    systems, one = evidence.systems, Gain(1.0, 1.0, 1.0, 0)
    columns = {
        "preset": [*systems],
        "speed at equal work": [f"{evidence.gains.get(name, one).factor:.2f}x" for name in systems],
        "tokens/s": [f"{system.tokens_per_second:,.0f}" for system in systems.values()],
        f"over {BASELINE}": [f"{evidence.gains_in_tokens.get(name, one).factor:.2f}x" for name in systems],
        "token delay, steps": [f"{system.token_delay:.2f}" for system in systems.values()],
    }
    drawn = f"Dots: simulated; lines: 95% of a moving-block bootstrap over {systems[BEST].steps} steps."
    caption = Caption("gain-chart", f"Speed at equal work over {BASELINE}", drawn)
    return [
        intervals(caption, list(evidence.gains.items()), f"times {BASELINE}"),
        *_doubts(evidence.winner, evidence.gains[evidence.winner]),
        table(columns),
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
        "All methods are simulated in the job of best. Token delay in steps. Pipeline cost: simulated step over a "
        "perfectly balanced one, micro-batches as packed, then with balanced assignment and order. ms/step: planning, "
        "measured on this machine."
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
    steps = {name: evidence.usual_steps[name] for name in (BASELINE, evidence.winner)}
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


def _config(evidence: Evidence, model: str, source: str, store: str | None) -> list[Markup]:
    config = code(recommended_config(evidence.verdict, model, source, store))
    chosen = "We chose the lightest activation checkpointing that leaves room for L_max."
    if evidence.winner == ELASTIC:
        chosen += " Pools and their micro-batches are chosen when the job starts."
    return [paragraph(chosen), config]


def recommended_config(verdict: Verdict, model: str, source: str, store: str | None = None) -> str:
    """The preset that ``verdict`` names and what its job settles; without ``store`` a placeholder stands for it."""
    job, preset = verdict.configured(), verdict.preset
    model, packing = _measured_model(job) or model, job.packing
    sections: dict[str, dict[str, Any]] = {
        "model": {"name" if model in MODEL_SHAPES or not Path(model).is_dir() else "pretrained": model},
        "data": {"store": store or "data/corpus", "context_window": job.context_window},
        "parallel": {"dp": job.layout.dp, "pp": job.layout.pp, "cp": job.layout.cp, "tp": job.layout.tp},
        "packing": {"micro_batches": packing.micro_batches},
    }
    vocab_size = (stored_vocab_size(store) if store else None) or 0
    if "name" in sections["model"] and vocab_size % job.layout.tp:  # every rank has equally many rows
        sections["model"]["vocab_size"] = vocab_size + -vocab_size % job.layout.tp
    if preset == BEST:
        sections["packing"]["max_length_factor"] = float(packing.length_factor)
    if job.layout.virtual_pp > 1 or job.layout.schedule != "1f1b":
        sections["parallel"] |= {"virtual_pp": job.layout.virtual_pp, "schedule": job.layout.schedule}
    if job.activation_checkpointing != "none":
        sections["training"] = {"activation_checkpointing": job.activation_checkpointing}
    remark = "" if store else "; name your token store in data.store (wlb prepare)"
    lines = [f"# For documents as in {_one_line(source)}{remark}.", f'preset = "{preset}"']
    for name, settings in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in settings.items())]
    return "\n".join(lines) + "\n"


def _measured_model(job: SimulatedJob) -> str | None:
    """The name of the model that the job's profile was measured with; None without a profile."""
    if job.pricing.profile is None:
        return None
    measured = replace(job.pricing.profile.model, vocab_size=1)
    names = (name for name, shape in MODEL_SHAPES.items() if replace(shape, vocab_size=1) == measured)
    return next(names, "MODEL OF THE PROFILE")


def _toml(value: Any) -> str:
    """JSON's numbers, lists and strings are TOML's, but for one control character that TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _one_line(name: str) -> str:
    """What may stand in a comment: TOML has no control characters there."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)
