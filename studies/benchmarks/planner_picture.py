"""The example of docs/packing.md: the same steps packed by ``variable_length`` and by ``balanced``, drawn as a picture.

    .venv/bin/python -m studies.benchmarks.planner_picture docs/images/planner.png

Both packers get the same documents, ``variable_length`` with its preset queues and ``balanced`` with ``max_delay`` 8.
Bars are the micro-batches of a few steps, with what is held back and what is taken early.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wlb.documents.synthetic import sample_lengths
from wlb.packing.plan import StepPlan
from wlb.packing.registry import make_packer
from wlb.report.plots import pyplot_without_display
from wlb.workload import Costs, make_workload

WINDOW, MICRO_BATCHES, SEED = 131_072, 4, 4
FIRST, STEPS = 4, 5  # steps shown
COLOURS = {"now": "#7aa6c2", "late": "#d97b4a", "early": "#78b37e"}


def draw(path: Path) -> None:
    """The same steps of the same documents, before and after."""
    lengths = sample_lengths(4000, WINDOW, SEED).tolist()
    workload = make_workload("7b", "h100", tp=8, cp=2)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    pyplot = pyplot_without_display()
    figure, panels = pyplot.subplots(2, STEPS, figsize=(11, 5.2), sharey=True)
    packers: dict[str, dict[str, Any]] = {"variable_length": {}, "balanced": {"max_delay": 8, "max_length_factor": 1.5}}
    for row, (packer, options) in zip(panels, packers.items(), strict=True):
        sizes: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "context_window": WINDOW} | options
        planner = make_packer(packer, workload=workload, **sizes)
        plans = planner.plan(lengths)[FIRST : FIRST + STEPS]
        for panel, plan in zip(row, plans, strict=True):
            _draw_step(panel, plan, starts, workload, looks_ahead=packer == "balanced")
        row[0].set_ylabel(f"{packer}\npredicted seconds", fontsize=9)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    words = ["of this global batch", "waited for this step", "taken early from the next"]
    figure.legend(handles, words, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_step(panel: Any, plan: StepPlan, starts: Sequence[int], workload: Costs, *, looks_ahead: bool) -> None:
    """Micro-batches as bars: long documents one by one, the longest at the bottom, short ones together."""
    for index, micro_batch in enumerate(plan.micro_batches):
        long: list[tuple[float, str]] = []
        short = dict.fromkeys(COLOURS, 0.0)
        for segment in sorted(micro_batch.segments, key=lambda s: -s.length):
            due = starts[segment.document] // (MICRO_BATCHES * WINDOW)
            kind = "late" if due < plan.step else "early" if due > plan.step and looks_ahead else "now"
            seconds = float(workload.document_seconds([segment.length])[0])
            if segment.length >= WINDOW // 8:
                long.append((seconds, kind))
            else:
                short[kind] += seconds
        bottom = 0.0
        for seconds, kind in long + [(seconds, kind) for kind, seconds in short.items()]:
            panel.bar(index, seconds, 0.8, bottom, color=COLOURS[kind], edgecolor="white", linewidth=0.8)
            bottom += seconds
    mean = sum(m.workload for m in plan.micro_batches) / len(plan.micro_batches)
    panel.axhline(mean, color="black", linewidth=0.8, linestyle=":")
    panel.set_title(
        f"step {plan.step}: heaviest / mean {plan.imbalance:.2f}\n{plan.tokens / (MICRO_BATCHES * WINDOW):.2f} "
        "global batches",
        fontsize=8,
    )
    panel.set_xticks([])
    panel.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("picture", type=Path, metavar="FILE", help="where it goes; its ending is its format")
    draw(parser.parse_args().picture)
