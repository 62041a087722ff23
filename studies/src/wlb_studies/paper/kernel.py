"""Figures 7 and 10: the cost of attention by length, and the FLOP/s that it reaches.

Simulated: the H100 preset, one layer of 7B. Measured: a profile of this machine (``wlb profile``), if given; its model
and machine differ from the paper's, so compare the shape of the curve, not its numbers.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from wlb.workload import Costs, ModelShape, make_workload, model_shape
from wlb.workload.flops import attention_flops
from wlb.workload.profile import WorkloadProfile, read_profile
from wlb_studies.experiment import Column, Finding, Report, Settings, Table
from wlb_studies.paper import paper
from wlb_studies.plots import lines_over_tokens

LENGTHS = tuple(2**power for power in range(8, 18))
QUERIES = (16, 32, 64, 128, 192, 256, 384, 512, 1024)
KEYS = 16_384
_MODEL = "7b"
_Point = tuple[int, float, float]  # tokens, milliseconds of one layer, TFLOP/s


def run(settings: Settings) -> Report:
    shape = model_shape(_MODEL)
    workload = make_workload(shape, "h100")
    profile = read_profile(settings.profile) if settings.profile else None
    queries = [_queries(workload, shape, q, KEYS) for q in QUERIES]
    documents = [_document(workload, shape, d) for d in LENGTHS]
    tables = [
        _table(f"queries over {KEYS:,} keys, one layer of 7B, H100 preset", "queries", "simulated", queries),
        _table("documents, one layer of 7B, H100 preset", "tokens", "simulated", documents),
    ]
    measured = _measured(profile) if profile else {}
    tables += [_table(name, "tokens", "measured", rows) for name, rows in measured.items()]
    curves = {"simulated: documents, 7B on H100": documents, f"simulated: queries over {KEYS:,} keys": queries}
    return Report(
        title="Latency and achieved FLOP/s of the attention kernel (paper: Figures 7 and 10)",
        documents="none: lengths are given",
        tables=tables,
        draw=partial(_draw, curves, measured),
        findings=_findings(queries),
        notes=[
            "forward only, as in the paper's Figure 10, which prints no values",
            "not modelled: tensor memory acceleration, to which the paper attributes the rise from 128 to 256 queries",
            *([] if profile else ["measured tables need --profile FILE, from wlb profile --out FILE"]),
        ],
    )


def _queries(workload: Costs, shape: ModelShape, queries: int, keys: int) -> _Point:
    """Curve for the last ``queries`` tokens of a document of ``keys`` tokens, one layer."""
    seconds = float(workload.piece_seconds([keys - queries], [keys], "forward")[0])
    before, whole = attention_flops(shape, [keys - queries, keys], "forward").tolist()
    return _point(queries, seconds, whole - before, shape)


def _document(workload: Costs, shape: ModelShape, tokens: int) -> _Point:
    seconds = float(workload.attention_seconds([tokens], "forward")[0])
    return _point(tokens, seconds, float(attention_flops(shape, [tokens], "forward")[0]), shape)


def _measured(profile: WorkloadProfile) -> dict[str, list[_Point]]:
    """Curve for one layer, from a measured profile."""
    shape, table = profile.model, profile.prefix_attention
    flops = attention_flops(shape, profile.attention.tokens, "forward") / profile.tp
    rows = zip(profile.attention.tokens, profile.attention.forward_seconds, flops, strict=True)
    per_pair = 4.0 * shape.layers * shape.heads * shape.head_dim / profile.tp
    keys = int(table.keys[-1])
    seconds = np.asarray(table.forward_seconds)[:, -1].tolist()
    return {
        f"documents, one layer, {profile.machine}": [_point(d, s, float(f), shape) for d, s, f in rows],
        f"queries over {keys:,} keys, one layer, {profile.machine}": [
            _point(q, s, per_pair * int(q) * keys, shape) for q, s in zip(table.queries, seconds, strict=True)
        ],
    }


def _point(tokens: int, seconds: float, flops: float, shape: ModelShape) -> _Point:
    """Convert ``seconds`` of all layers to one layer."""
    return int(tokens), 1e3 * float(seconds) / shape.layers, flops / float(seconds) / 1e12


def _table(title: str, counted: str, kind: Any, rows: list[_Point]) -> Table:
    columns = (Column(counted, format=",.0f"), Column("latency, ms", kind, ".4g"), Column("TFLOP/s", kind, ".4g"))
    return Table(title, columns, [*rows])


def _findings(queries: list[_Point]) -> list[Finding]:
    latency = {tokens: milliseconds for tokens, milliseconds, _ in queries}
    rate = {tokens: flops for tokens, _, flops in queries}
    flat = latency[paper.KERNEL_FLAT_UNTIL] / latency[QUERIES[0]]
    low, high = (rate[tokens] for tokens in paper.KERNEL_RISE)
    return [
        Finding(
            f"latency is the same from {QUERIES[0]} to {paper.KERNEL_FLAT_UNTIL} queries",
            abs(flat - 1) < 0.02,
            f"{flat:.3f} times as long",
        ),
        Finding(
            f"achieved FLOP/s rise significantly from {paper.KERNEL_RISE[0]} to {paper.KERNEL_RISE[1]} queries",
            high > 1.05 * low,
            f"{low:.0f} and {high:.0f} TFLOP/s",
        ),
    ]


def _draw(curves: dict[str, list[_Point]], measured: dict[str, list[_Point]], path: Path) -> None:
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for kind, rows in (("simulated", curves), ("measured", measured)):
        for column, what in ((1, "latency of one layer, ms"), (2, "TFLOP/s")):
            lines = {
                name.partition(", one layer")[0]: ([float(p[0]) for p in points], [p[column] for p in points])
                for name, points in rows.items()
            }
            panels |= {f"{what} ({kind})": lines} if lines else {}
    log = [name for name in panels if name.startswith("latency")]
    lines_over_tokens(path, "attention forward", panels, label="tokens of the document, or queries", log=log)
