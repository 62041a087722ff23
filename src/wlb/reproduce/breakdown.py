"""Figure 13: what each remedy alone gives for 7B-128K, then ours one after another.

With dp 1 and as many micro-batches as pipeline ranks, as in the paper, there is nothing to assign and little to order;
so the same job is shown once more with four data-parallel ranks and four times as many micro-batches on each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from wlb.reproduce import paper
from wlb.reproduce.charts import grouped_bars
from wlb.reproduce.documents import corpus
from wlb.reproduce.experiment import Column, Documents, Finding, Report, Settings, Table
from wlb.reproduce.systems import ASSUMED, Bench, speedup
from wlb.simulate.named_jobs import PAPER_JOBS, NamedJob

_STEPS = 200
_JOB = PAPER_JOBS["7b-128k"]
_WIDE = _JOB._replace(dp=4)
_WIDE_MICRO_BATCHES = 16
_WIDE_SHARE = 16  # of the documents of a step, so that both jobs see as many

_EARLY: dict[str, Any] = {"early_release": True}
_ASSIGNED = _EARLY | {"assignment": "balanced"}
_ORDERED = _ASSIGNED | {"order": "pipeline"}

# Name, preset, and what replaces its settings.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Plain-4D": ("plain-4d", {}),
    "cp: per-document": ("plain-4d", {"sharding": "per_document"}),
    "cp: adaptive": ("plain-4d", {"sharding": "adaptive"}),
    "cp: hybrid (ours)": ("plain-4d", {"sharding": "hybrid"}),
    "pp: packing": ("wlb-llm", {"sharding": "per_sequence"}),
    "WLB-LLM": ("wlb-llm", {}),
    "+ early release (ours)": ("wlb-llm", {"packing": _EARLY}),
    "+ assignment (ours)": ("wlb-llm", {"packing": _ASSIGNED}),
    "+ order (ours)": ("wlb-llm", {"packing": _ORDERED}),
    "+ hybrid sharding = best": ("best", {}),
}


def run(settings: Settings) -> Report:
    documents = corpus(settings)
    steps = settings.steps or _STEPS
    quoted = [paper.BREAKDOWN.get(name) for name in VARIANTS]
    narrow = _speedups(_JOB, documents, steps, settings)
    wide = _speedups(_WIDE, documents, max(1, steps // _WIDE_SHARE), settings, micro_batches=_WIDE_MICRO_BATCHES)
    names = [*VARIANTS]
    return Report(
        title="What each remedy gives, 7B-128K (paper: Figure 13)",
        documents=documents.source,
        tables=[
            Table(
                "speedup over Plain-4D",
                (
                    Column("remedy"),
                    Column("64 GPUs", "quoted", ".2f"),
                    Column("64 GPUs", "simulated"),
                    Column(f"dp {_WIDE.dp}, {_WIDE_MICRO_BATCHES} micro-batches a rank", "simulated"),
                ),
                [*zip(names, quoted, narrow, wide, strict=True)],
            )
        ],
        draw=partial(
            grouped_bars,
            title="7B-128K: speedup over Plain-4D, simulated",
            groups=[name.replace(" (ours)", "\n(ours)").replace(" = ", "\n= ") for name in names],
            series={
                "quoted": quoted,
                "64 GPUs": narrow,
                f"dp {_WIDE.dp}, {_WIDE_MICRO_BATCHES} micro-batches a rank": wide,
            },
            label="speedup over Plain-4D",
        ),
        findings=_findings(dict(zip(names, narrow, strict=True))),
        notes=[ASSUMED, "documents cut at the window by the data loader, for all systems alike"],
    )


def _speedups(job: NamedJob, documents: Documents, steps: int, settings: Settings, **layout: Any) -> list[float]:
    bench = Bench(job, documents, steps, settings)
    results = []
    for name, (preset, changed) in VARIANTS.items():
        settings.on_progress(f"{name}, dp {job.dp}")
        results.append(bench.run(preset, **layout, **changed))
    return [speedup(result, results[0]) for result in results]


def _findings(gains: dict[str, float]) -> list[Finding]:
    return [
        Finding(
            "adaptive sharding gains more than per-document sharding alone",
            gains["cp: adaptive"] >= gains["cp: per-document"],
            f"{gains['cp: adaptive']:.3f}, {gains['cp: per-document']:.3f}",
        ),
        Finding(
            "packing gains more than sharding",
            gains["pp: packing"] > gains["cp: adaptive"],
            f"{gains['pp: packing']:.3f}, {gains['cp: adaptive']:.3f}",
        ),
        Finding(
            "both together gain most",
            gains["WLB-LLM"] > max(gains["pp: packing"], gains["cp: adaptive"]),
            f"{gains['WLB-LLM']:.3f}",
        ),
    ]
