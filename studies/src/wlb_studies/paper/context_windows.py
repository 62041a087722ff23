"""Figure 14: speedup of WLB-LLM for 7B as the context window grows, also beyond the paper's longest.

"A longer window" has two readings: the same documents at every window, of up to 1M tokens, cut where they do not fit;
or documents that grow in proportion to the window (only without a file). Up to 256K the job runs in the paper's layout
for 128K. Longer windows get more context-parallel ranks, so that each still has at most 128K tokens of a micro-batch.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from wlb_studies.experiment import Column, Finding, Report, Settings, Table
from wlb_studies.paper import paper
from wlb_studies.paper.bench import ASSUMED, Bench, Documents, corpus, grown_corpus
from wlb_studies.paper.jobs import PAPER_JOBS
from wlb_studies.plots import lines_over_tokens

_1K = 1024
WINDOWS = tuple(thousands * _1K for thousands in (32, 64, 96, 128, 160, 256, 512, 1024))
_PAPER_WINDOWS = 5  # of them, up to 160K
_TOKENS = 100 * 4 * 131_072  # of each window: those of 100 steps at 128K,
_LEAST_STEPS = 64  # and over fewer steps, tokens/s favour systems in which many long documents still wait at the end
_TOKENS_OF_A_RANK = 128 * _1K


class _OfWindow(NamedTuple):
    """A row of the table. The last two are for documents that grow; None if a file gives the lengths."""

    window: str
    gpus: int
    layout: str
    quoted: float | None
    wlb: float
    balanced: float
    grown_wlb: float | None
    grown_balanced: float | None

    @property
    def ratios(self) -> list[float]:
        """Speedup of balanced over WLB-LLM, in both readings."""
        grown = [self.grown_balanced / self.grown_wlb] if self.grown_balanced and self.grown_wlb else []
        return [self.balanced / self.wlb, *grown]


def run(settings: Settings) -> Report:
    same = corpus(settings, longest=max(WINDOWS))
    rows = [_row(window, same, settings) for window in WINDOWS]
    ratios = [ratio for row in rows for ratio in row.ratios]
    slower = [row.window for row in rows if min(row.ratios) <= 1]
    of_paper = rows[:_PAPER_WINDOWS]
    columns = (
        Column("window"),
        Column("GPUs", format=",.0f"),
        Column("tp,cp,pp,dp"),
        Column("WLB-LLM", "quoted", ".2f"),
        Column("same documents: WLB-LLM", "simulated"),
        Column("balanced", "simulated"),
        Column("documents grow: WLB-LLM", "simulated"),
        Column("balanced", "simulated"),
    )
    return Report(
        title="Speedup over the context window, 7B (paper: Figure 14)",
        documents=same.source,
        tables=[Table("speedup over Plain-4D", columns, [*rows])],
        draw=partial(
            lines_over_tokens,
            title="7B: speedup over Plain-4D",
            panels={"7B: speedup over Plain-4D, simulated": _lines(rows)},
            label="context window, tokens",
        ),
        findings=[
            Finding(
                "the speedup grows with the window, 32K to 160K (the same documents)",
                all(longer.wlb > shorter.wlb for shorter, longer in pairwise(of_paper)),
                ", ".join(f"{row.window} {row.wlb:.3f}" for row in of_paper),
            ),
            Finding(
                "ours: balanced gains more than WLB-LLM at every window, both ways",
                not slower,
                ", ".join(slower) if slower else f"by {min(ratios):.3f} to {max(ratios):.3f} times",
            ),
        ],
        notes=[
            ASSUMED,
            "assumed: the layouts of windows other than 128K, and that activations fit without recomputation",
            "documents cut at the window by the data loader, for all systems alike",
        ],
    )


def _row(window: int, same: Documents, settings: Settings) -> _OfWindow:
    settings.on_progress(f"{window // _1K}K")
    job = PAPER_JOBS["7b-128k"]
    layout = replace(job.layout, cp=max(job.layout.cp, window // _TOKENS_OF_A_RANK))
    job = job._replace(context_window=window, layout=layout)
    steps = settings.steps or max(_LEAST_STEPS, _TOKENS // (layout.pp * window))

    def speedups(documents: Documents) -> tuple[float, float]:
        bench = Bench(job, documents, steps, settings)
        return bench.speedup(bench.run("wlb-llm")), bench.speedup(bench.run("balanced"))

    grown = speedups(grown_corpus(settings, window)) if settings.lengths is None else (None, None)
    quoted = paper.CONTEXT_WINDOWS.get(window)
    return _OfWindow(f"{window // _1K}K", layout.world_size, paper.sizes(layout), quoted, *speedups(same), *grown)


def _lines(rows: list[_OfWindow]) -> dict[str, tuple[list[int], list[float]]]:
    columns: dict[str, list[float | None]] = {
        "quoted: WLB-LLM": [row.quoted for row in rows],
        "same documents: WLB-LLM": [row.wlb for row in rows],
        "same documents: balanced": [row.balanced for row in rows],
        "documents grow: WLB-LLM": [row.grown_wlb for row in rows],
        "documents grow: balanced": [row.grown_balanced for row in rows],
    }
    points = {
        name: [(window, value) for window, value in zip(WINDOWS, column, strict=True) if value is not None]
        for name, column in columns.items()
    }
    return {name: ([x for x, _ in line], [y for _, y in line]) for name, line in points.items() if line}
