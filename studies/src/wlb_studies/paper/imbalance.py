"""Figures 1 and 4: how unevenly the GPUs of one large job are loaded.

The paper's job trains a 405B model with a 128K window on 8,192 GPUs (tp 8, cp 16, pp 16, dp 4). It gives the layout,
but neither the micro-batches per rank nor the number of steps in the latency sum. Here a rank runs as many
micro-batches as there are pipeline ranks, and each step counts alone. Latency is the compute time of a GPU, without
waiting; tensor-parallel ranks are alike.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.job.job import Job
from wlb.simulate.rate import first_steps
from wlb_studies.experiment import Column, Finding, Report, Settings, Table
from wlb_studies.paper import paper
from wlb_studies.paper.bench import Bench, corpus
from wlb_studies.paper.jobs import ALL_JOBS
from wlb_studies.plots import BALANCED, BASELINE, COLOURS, pyplot_without_display, save, tidy

_STEPS = 64  # with fewer steps, tokens/s favour systems in which many long documents still wait at the end
_JOB = ALL_JOBS["405b-128k"]  # 1F1B; 126 layers. Compute per GPU hardly depends on it
SYSTEMS = ("plain-4d", "fixed-4d", "wlb-llm", "balanced")
# Compared axes of (steps, pp, dp, cp), and the axes inside a pp, dp or cp rank.
_TOGETHER = {"all GPUs": (1, 2, 3), "dp ranks": (2,), "pp ranks": (1,), "cp ranks of a group": (3,)}
_INSIDE = {1: (2, 3), 2: (3,), 3: ()}
Array = NDArray[np.float64]


class Latency(NamedTuple):
    """Seconds that each GPU computes in each step, shape (steps, pp, dp, cp): everything, and attention alone.

    ``seconds`` are step times, including waiting.
    """

    all: Array
    attention: Array
    seconds: Array
    tokens: int


def run(settings: Settings) -> Report:
    documents = corpus(settings)
    bench = Bench(_JOB, documents, settings.steps or _STEPS, settings)
    found = {}
    for system in SYSTEMS:
        settings.on_progress(f"{system} on {_JOB.layout.world_size:,} GPUs")
        found[system] = _latency(bench.job(system, virtual_pp=1), bench)
    plain = found["plain-4d"]
    rates = {system: latency.tokens / float(latency.seconds.sum()) for system, latency in found.items()}
    return Report(
        title=f"Latency per GPU, {_JOB.layout.world_size:,} GPUs (paper: Figures 1 and 4)",
        documents=documents.source,
        tables=[_table(found, rates)],
        draw=partial(_draw, found),
        findings=_findings(plain, rates),
        notes=[
            "model llama3-405b; assumed: 16 micro-batches a rank, 1F1B, no limit of memory, WLB-LLM's thresholds; "
            "means over steps of the slowest over the mean",
            "the paper's 1.44 is the slowest GPU over the others, summed over a trace of unknown length",
            "documents cut at the window by the data loader, for all systems alike",
        ],
    )


def _latency(job: Job, bench: Bench) -> Latency:
    parts = []
    for _, steps in first_steps(job, bench.lengths, bench.steps):
        attention = (steps.shards.attention_forward + steps.shards.attention_backward).sum(axis=2)  # (steps, dp, cp)
        by_rank = steps.costs.job.stage_shares[:, None, None] * attention[:, None]
        parts.append((steps.gpu_seconds, by_rank, steps.seconds, steps.tokens))
    everything, attention, seconds, tokens = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Latency(everything, attention, seconds, int(tokens.sum()))


def _table(found: dict[str, Latency], rates: dict[str, float]) -> Table:
    rows: list[tuple[Any, ...]] = []
    for name, axes in _TOGETHER.items():
        for part, said in (("all", "computing"), ("attention", "attention alone")):
            quoted = paper.IMBALANCE_SLOWEST_GPU if name == "all GPUs" and part == "all" else None
            values = [slowest_over_mean(getattr(latency, part), axes) for latency in found.values()]
            rows.append((f"{name}, {said}", quoted, *values))
    rows.append(("speedup over plain-4d", None, *(rate / rates["plain-4d"] for rate in rates.values())))
    columns = (
        Column("slowest over mean"),
        Column("plain-4d", "quoted", ".2f"),
        *(Column(name, "simulated") for name in found),
    )
    return Table(f"{_JOB.layout.world_size:,} GPUs, {len(found['plain-4d'].seconds)} steps", columns, rows)


def slowest_over_mean(latency: Array, axes: tuple[int, ...]) -> float:
    """Mean of the largest over the mean along ``axes``.

    For pp and dp ranks this compares sums over their GPUs, not single GPUs.
    """
    if len(axes) == 1:
        latency = latency.sum(axis=_INSIDE[axes[0]], keepdims=True)
    return float((latency.max(axis=axes) / latency.mean(axis=axes)).mean())


def _findings(plain: Latency, rates: dict[str, float]) -> list[Finding]:
    attention = plain.attention
    dp, pp, cp = (slowest_over_mean(attention, axes) for axes in ((2,), (1,), (3,)))
    return [
        Finding(
            "pipeline ranks of one data-parallel rank are alike, data-parallel ranks differ (attention alone)",
            dp > pp,
            f"slowest over mean {pp:.3f} over pp, {dp:.3f} over dp",
        ),
        Finding("the ranks of a context-parallel group differ", cp > 1.01, f"slowest over mean {cp:.3f}"),
        Finding(
            "ours: balanced is faster than WLB-LLM",
            rates["balanced"] > rates["wlb-llm"],
            f"{rates['balanced'] / rates['wlb-llm']:.3f} times its tokens/s",
        ),
    ]


def _draw(found: dict[str, Latency], path: Path) -> None:
    """Draw all GPUs by rank, grouped by dp and pp, and one context-parallel group, for the median step."""
    layout = _JOB.layout
    colours = dict(zip(found, (BASELINE, *COLOURS[:2], BALANCED), strict=True))
    figure, (sorted_axis, group_axis, cp_axis) = pyplot_without_display().subplots(
        1, 3, figsize=(16, 4.2), constrained_layout=True
    )
    for name, latency in found.items():
        values = np.sort(_median_step(latency.all).ravel())[::-1]
        gpus = np.arange(values.size) * layout.tp
        sorted_axis.plot(gpus, values / values.mean(), color=colours[name], label=name, lw=2)
    sorted_axis.set(xlabel="GPUs, slowest first", ylabel="computing, over the mean", title="all GPUs")
    plain = _median_step(found["plain-4d"].attention)
    plain = plain / plain.mean()  # (pp, dp, cp)
    for dp in range(layout.pools):
        places = np.repeat(dp * layout.pp + np.arange(layout.pp), layout.pool_size)
        group_axis.scatter(places, plain[:, dp].ravel(), s=5, color=COLOURS[dp], label=f"dp {dp}")
    group_axis.set(xlabel="dp and pp rank", title="plain-4d: attention alone, over the mean")
    slowest = int(plain.max(axis=(0, 2)).argmax())
    for name in ("plain-4d", "wlb-llm", "balanced"):
        group = _median_step(found[name].attention)[0, slowest]
        cp_axis.plot(np.arange(layout.pool_size), group / group.mean(), "o-", color=colours[name], label=name)
    cp_axis.set(xlabel="cp rank", title=f"inside the cp group of dp {slowest}, pp 0: attention alone, over the mean")
    for axis in (sorted_axis, group_axis, cp_axis):
        tidy(axis)
    figure.suptitle(f"{layout.world_size:,} GPUs, one step, simulated", fontsize=11)
    save(figure, path)


def _median_step(latency: Array) -> Array:
    ratios = latency.max(axis=(1, 2, 3)) / latency.mean(axis=(1, 2, 3))
    middle: Array = latency[np.argsort(ratios)[len(ratios) // 2]]
    return middle
