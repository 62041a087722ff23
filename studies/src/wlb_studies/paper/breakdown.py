"""Figure 13: the gain of each remedy alone for 7B-128K, then ours added one by one, and waiting without each of them.

With dp 1 and as many micro-batches as pipeline ranks, as in the paper, there is nothing to assign and little to order.
So the same job is shown again with four data-parallel ranks and four times as many micro-batches on each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

from wlb.job.job import Job
from wlb.simulate.job import PAPER_JOBS
from wlb_studies.experiment import Column, Finding, Report, Settings, Table, bars_of
from wlb_studies.paper import paper
from wlb_studies.paper.bench import ASSUMED, SCHEDULE, Bench, corpus

_STEPS = 200
_JOB = PAPER_JOBS["7b-128k"]
_WIDE = _JOB._replace(layout=replace(_JOB.layout, dp=4), micro_batches=16)
Prices = Literal["own", "balanced's", "W_a + W_l"]
_WIDE_SHARE = 4  # share of the steps, since each has 16 times as many documents


# Ours with delay, in the paper's groups, schedule and number of micro-batches, with the paper's L_max.
_WAITS: dict[str, Any] = {"max_delay": 8, "lookahead": 0.5, "max_length_factor": 1.5}


class Variant(NamedTuple):
    """A preset, changed settings, and the prices for packing: its own, those of ``balanced``, or W_a + W_l."""

    preset: str
    changed: dict[str, Any]
    prices: Prices = "own"

    def job(self, bench: Bench) -> Job:
        job = bench.job(self.preset, **self.changed)
        if "schedule" in self.changed:
            packing = job.packing.changed(pool_micro_batches=job.micro_batches_per_rank) if job.pools else job.packing
            job = replace(job, packing=packing, pool=job.layout.cp)
        if self.prices == "own":
            return job
        prices = WAITING.job(bench).packing_prices if self.prices == "balanced's" else job.workload
        return replace(job, packed_by=prices)


def _waiting(packing: dict[str, Any], sharding: str = "balanced", prices: Prices = "balanced's") -> Variant:
    return Variant("balanced", SCHEDULE | {"packing": packing, "sharding": sharding}, prices)


def _ours(sharding: str = "adaptive", **packing: Any) -> Variant:
    return _waiting(_WAITS | packing, sharding, "W_a + W_l")


def _without(**packing: Any) -> Variant:
    return _waiting(_WAITS | packing)


WAITING = _waiting(_WAITS, prices="own")


_AS_PACKED: dict[str, Any] = {"assignment": "arrival", "order": "arrival"}

ONE_BY_ONE = {
    "Plain-4D": Variant("plain-4d", {}),
    "cp: per-document": Variant("plain-4d", {"sharding": "per_document"}),
    "cp: adaptive": Variant("plain-4d", {"sharding": "adaptive"}),
    "cp: balanced (ours)": Variant("plain-4d", {"sharding": "balanced"}),
    "pp: packing": Variant("wlb-llm", {"sharding": "per_sequence"}),
    "WLB-LLM": Variant("wlb-llm", {}),
    "+ release search (ours)": _ours(lookahead=0.0, **_AS_PACKED),
    "+ look-ahead (ours)": _ours(**_AS_PACKED),
    "+ assignment (ours)": _ours(order="arrival"),
    "+ order (ours)": _ours(),
    "+ balanced sharding (ours)": _ours("balanced"),
    "+ prices of sharded documents": WAITING,
    "balanced: slices and planned order": Variant("balanced", {}),
}
LEFT_OUT = {
    "nothing": WAITING,
    "release search (variable_length instead)": _waiting({"method": "variable_length"}),
    "waiting (max_delay = 0)": _without(max_delay=0),
    "look-ahead": _without(lookahead=0.0),
    "assignment": _without(assignment="arrival"),
    "order": _without(order="arrival"),
    "balanced sharding (adaptive instead)": _waiting(_WAITS, "adaptive", "own"),
    "prices of sharded documents (W_a + W_l instead)": _ours("balanced"),
}


def run(settings: Settings) -> Report:
    documents = corpus(settings)
    steps = settings.steps or _STEPS
    narrow = _speedups(Bench(_JOB, documents, steps, settings), settings)
    wide = _speedups(Bench(_WIDE, documents, max(1, steps // _WIDE_SHARE), settings), settings)
    on_64, on_256 = (
        Column("64 GPUs", "simulated"),
        Column(f"dp {_WIDE.layout.dp}, {_WIDE.micro_batches} micro-batches a rank", "simulated"),
    )
    table = Table(
        "speedup over Plain-4D",
        (Column("remedy"), Column("64 GPUs", "quoted", ".2f"), on_64, on_256),
        [(name, paper.BREAKDOWN.get(name), narrow[name], wide[name]) for name in ONE_BY_ONE],
    )
    left_out = Table(
        "balanced with delay, without one of its ingredients: speed over all of them",
        (Column("left out"), on_64, on_256),
        [(name, _over_all(narrow, name), _over_all(wide, name)) for name in LEFT_OUT],
    )
    return Report(
        title="The gain of each remedy, 7B-128K (paper: Figure 13)",
        documents=documents.source,
        tables=[table, left_out],
        draw=bars_of(
            table,
            {"quoted": 1, on_64.name: 2, on_256.name: 3},
            title="7B-128K: speedup over Plain-4D, simulated",
            label="speedup over Plain-4D",
        ),
        findings=_findings(narrow, wide),
        notes=[
            ASSUMED,
            "documents cut at the window by the data loader, for all systems alike",
            "our attention keeps keys and values for the backward, and so does every system here",
        ],
    )


def _speedups(bench: Bench, settings: Settings) -> dict[str, float]:
    gains = {}
    for name, variant in (ONE_BY_ONE | LEFT_OUT).items():
        job = variant.job(bench)
        settings.on_progress(f"{name}, dp {job.layout.dp}")
        gains[name] = bench.speedup(bench.simulate(job))
    return gains


def _over_all(gains: dict[str, float], name: str) -> float:
    return gains[name] / gains["nothing"]


def _findings(gains: dict[str, float], wide: dict[str, float]) -> list[Finding]:
    _, *left_out = LEFT_OUT
    idle = [name for name in left_out if min(_over_all(gains, name), _over_all(wide, name)) >= 1]
    packing, adaptive, per_document = (gains[name] for name in ("pp: packing", "cp: adaptive", "cp: per-document"))
    return [
        Finding(
            "adaptive sharding gains more than per-document sharding alone",
            adaptive >= per_document,
            f"{adaptive:.3f}, {per_document:.3f}",
        ),
        Finding("packing gains more than sharding", packing > adaptive, f"{packing:.3f}, {adaptive:.3f}"),
        Finding("both together gain most", gains["WLB-LLM"] > max(packing, adaptive), f"{gains['WLB-LLM']:.3f}"),
        Finding(
            "ours: with delay, leaving out any ingredient loses speed on at least one of the two jobs",
            not idle,
            f"nothing lost without: {', '.join(idle)}" if idle else f"{len(left_out)} ingredients",
        ),
    ]
