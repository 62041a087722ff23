"""Figure 13: the gain of each remedy alone for 7B-128K, and of ours.

With dp 1 and as many micro-batches as pipeline ranks, as in the paper, there is nothing to assign and little to order.
So the same job is shown again with four data-parallel ranks and four times as many micro-batches on each.
"""

from dataclasses import replace
from typing import Any

from wlb_studies.experiment import Column, Finding, Report, Settings, Table, bars_of
from wlb_studies.paper import paper
from wlb_studies.paper.bench import ASSUMED, Bench, corpus
from wlb_studies.paper.jobs import PAPER_JOBS

_STEPS = 200
_JOB = PAPER_JOBS["7b-128k"]
_WIDE = _JOB._replace(layout=replace(_JOB.layout, dp=4), rank_micro_batches=16)
_WIDE_SHARE = 4  # share of the steps, since each has 16 times as many documents
# Preset and changed settings.
REMEDIES: dict[str, tuple[str, dict[str, Any]]] = {
    "cp: per-document": ("plain-4d", {"sharding": "per_document"}),
    "cp: adaptive": ("plain-4d", {"sharding": "adaptive"}),
    "pp: packing": ("wlb-llm", {"sharding": "per_sequence"}),
    "WLB-LLM": ("wlb-llm", {}),
    "balanced (ours)": ("balanced", {}),
}


def run(settings: Settings) -> Report:
    documents = corpus(settings)
    steps = settings.steps or _STEPS
    narrow = _speedups(Bench(_JOB, documents, steps, settings), settings)
    wide = _speedups(Bench(_WIDE, documents, max(1, steps // _WIDE_SHARE), settings), settings)
    on_64, on_256 = (
        Column("64 GPUs", "simulated"),
        Column(f"dp {_WIDE.layout.dp}, {_WIDE.rank_micro_batches} micro-batches a rank", "simulated"),
    )
    table = Table(
        "speedup over Plain-4D",
        (Column("remedy"), Column("64 GPUs", "quoted", ".2f"), on_64, on_256),
        [(name, paper.BREAKDOWN.get(name), narrow[name], wide[name]) for name in REMEDIES],
    )
    return Report(
        title="The gain of each remedy, 7B-128K (paper: Figure 13)",
        documents=documents.source,
        tables=[table],
        draw=bars_of(
            table,
            {"quoted": 1, on_64.name: 2, on_256.name: 3},
            title="7B-128K: speedup over Plain-4D, simulated",
            label="speedup over Plain-4D",
        ),
        findings=_findings(narrow),
        notes=[
            ASSUMED,
            "documents cut at the window by the data loader, for all systems alike",
            "our attention keeps keys and values for the backward, and so does every system here",
        ],
    )


def _speedups(bench: Bench, settings: Settings) -> dict[str, float]:
    gains = {}
    for name, (preset, changed) in REMEDIES.items():
        settings.on_progress(name)
        gains[name] = bench.speedup(bench.run(preset, **changed))
    return gains


def _findings(gains: dict[str, float]) -> list[Finding]:
    packing, adaptive, per_document = (gains[name] for name in ("pp: packing", "cp: adaptive", "cp: per-document"))
    return [
        Finding(
            "adaptive sharding gains more than per-document sharding alone",
            adaptive >= per_document,
            f"{adaptive:.3f}, {per_document:.3f}",
        ),
        Finding("packing gains more than sharding", packing > adaptive, f"{packing:.3f}, {adaptive:.3f}"),
        Finding("both together gain most", gains["WLB-LLM"] > max(packing, adaptive), f"{gains['WLB-LLM']:.3f}"),
    ]
