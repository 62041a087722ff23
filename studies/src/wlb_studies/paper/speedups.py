"""Table 1 and Figure 12: the paper's eight jobs under its three systems and ours.

Also each of the paper's two remedies alone: its packing with Plain-4D's sharding (the pipeline's part), and its
sharding of Plain-4D's micro-batches (context parallelism's part).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from wlb.simulate.job import PAPER_JOBS
from wlb_studies.experiment import Column, Finding, Report, Settings, Table, Value, bars_of
from wlb_studies.paper import paper
from wlb_studies.paper.bench import ASSUMED, Bench, Documents, Treatment, corpus

_STEPS = 200  # with fewer steps, tokens/s favour systems in which many long documents still wait at the end


class Speedups(NamedTuple):
    """Speedups over Plain-4D, and the share of whole documents' attention that Plain-4D computes."""

    fixed: float
    wlb: float
    balanced: float
    pipeline: float
    context: float
    plain_attention: float


def run(settings: Settings) -> Report:
    documents = corpus(settings)
    rows = {treatment: _rows(treatment, documents, settings) for treatment in ("cut", "whole")}
    cut = rows["cut"]
    table = _table("documents cut at the window by the data loader, for all systems alike", cut, quoted=True)
    whole = _table("whole documents, which only Plain-4D cuts", rows["whole"], quoted=False)
    return Report(
        title="Speedups over Plain-4D (paper: Table 1, Figure 12)",
        documents=documents.source,
        tables=[table, whole],
        draw=bars_of(
            table,
            {"quoted: WLB-LLM": 3, "Fixed-4D": 4, "WLB-LLM": 5, "balanced": 6},
            title="speedup over Plain-4D, simulated; documents cut by the data loader for all systems alike",
            label="speedup over Plain-4D",
        ),
        findings=findings(cut),
        notes=[ASSUMED, "the paper prints the value of only one job, 7B-128K"],
    )


def _rows(treatment: Treatment, documents: Documents, settings: Settings) -> dict[str, Speedups]:
    rows = {}
    for name, job in PAPER_JOBS.items():
        settings.on_progress(f"{name}, documents {treatment}")
        rows[name] = _row(Bench(job, documents, settings.steps or _STEPS, settings, treatment))
    return rows


def _row(bench: Bench) -> Speedups:
    """Fixed-4D with the better of the two static shardings, as in the paper (section 7.1)."""
    runs = [bench.run("fixed-4d", sharding=sharding) for sharding in ("per_sequence", "per_document")]
    runs += [bench.run("wlb-llm"), bench.run("balanced"), bench.run("wlb-llm", sharding="per_sequence")]
    runs.append(bench.run("plain-4d", sharding="adaptive"))
    per_sequence, per_document, wlb, balanced, pipeline, context = map(bench.speedup, runs)
    return Speedups(max(per_sequence, per_document), wlb, balanced, pipeline, context, bench.plain.attention_kept)


def _table(title: str, rows: dict[str, Speedups], *, quoted: bool) -> Table:
    columns = (
        Column("job"),
        Column("GPUs", format=",.0f"),
        Column("tp,cp,pp,dp"),
        Column("WLB-LLM", "quoted", ".2f"),
        Column("Fixed-4D", "simulated"),
        Column("WLB-LLM", "simulated"),
        Column("balanced", "simulated"),
        Column("packing alone", "simulated"),
        Column("sharding alone", "simulated"),
        Column("attention of Plain-4D", "simulated", ".0%"),
    )
    told = {"7b-128k": paper.BREAKDOWN["WLB-LLM"], "mean": paper.WLB_LLM_SPEEDUP}
    lines: list[tuple[Value, ...]] = [
        (name, PAPER_JOBS[name].layout.world_size, paper.sizes(PAPER_JOBS[name].layout), told.get(name), *row)
        for name, row in rows.items()
    ]
    lines.append(("mean", None, None, told["mean"], *_mean(rows.values())))
    for window, value in paper.WLB_LLM_SPEEDUP_BY_WINDOW.items():
        mean = _mean(row for name, row in rows.items() if PAPER_JOBS[name].context_window == window)
        lines.append((f"mean {window // 1024}K", None, None, value, *mean))
    return Table(title, columns, lines if quoted else [(*line[:3], None, *line[4:]) for line in lines])


def findings(rows: dict[str, Speedups]) -> list[Finding]:
    """The paper's findings (sections 7.2 and 7.3), tested with these numbers."""
    models, windows = _mean_by("model", rows), _mean_by("context_window", rows)
    by_window = sorted(windows.items(), key=lambda item: int(item[0]))
    mean = _mean(rows.values())
    measured = rows["7b-128k"]  # where the paper shows it
    slower = [f"{name} {row.balanced:.3f}" for name, row in rows.items() if row.balanced <= row.wlb]
    jobs = sum(row.pipeline > row.context for row in rows.values())
    return [
        Finding(
            "larger models gain less",
            all(larger < smaller for smaller, larger in pairwise(models.values())),
            ", ".join(f"{model} {value:.3f}" for model, value in models.items()),
        ),
        Finding(
            "the pipeline level matters more than the context level",
            measured.pipeline > measured.context and mean.pipeline > mean.context,
            f"packing and sharding alone: 7b-128k {measured.pipeline:.3f} and {measured.context:.3f}, means "
            f"{mean.pipeline:.3f} and {mean.context:.3f}; packing gains more in {jobs} of {len(rows)} jobs",
        ),
        Finding(
            "longer windows gain more",
            all(longer > shorter for (_, shorter), (_, longer) in pairwise(by_window)),
            ", ".join(f"{int(window) // 1024}K {value:.3f}" for window, value in by_window),
        ),
        Finding(
            f"balancing within fixed lengths gains little (paper: {paper.FIXED_4D_SPEEDUP})",
            mean.fixed < 1 + (float(np.mean([*models.values()])) - 1) / 2,
            f"Fixed-4D {mean.fixed:.3f}, WLB-LLM {mean.wlb:.3f}",
        ),
        Finding(
            "ours: balanced gains more than WLB-LLM, on every job",
            not slower,
            f"{mean.balanced:.3f}" + (f", but for {', '.join(slower)}" if slower else ""),
        ),
    ]


def _mean(rows: Iterable[Speedups]) -> Speedups:
    return Speedups(*np.mean([*rows], axis=0).tolist())


def _mean_by(size: str, rows: dict[str, Speedups]) -> dict[str | int, float]:
    """WLB-LLM's mean speedup over the jobs with each value of ``size``, in order."""
    jobs: dict[str | int, list[float]] = {}
    for name, row in rows.items():
        jobs.setdefault(getattr(PAPER_JOBS[name], size), []).append(row.wlb)
    return {value: float(np.mean(of_value)) for value, of_value in jobs.items()}
