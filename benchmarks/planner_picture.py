"""Pictures of makespan packing: trade-off curves, and one step drawn before and after.

    .venv/bin/python benchmarks/planner_picture.py docs/images/planner.png

draws the example of docs/planner.md: the same documents packed by ``variable_length`` with its preset queues and by
``makespan``, as micro-batches of a few steps, with what is held back and what is taken early.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner_curves import Point, front

from wlb.documents.synthetic import sample_lengths
from wlb.errors import require
from wlb.packing import make_packer
from wlb.packing.plan import StepPlan
from wlb.workload import Workload, make_workload

WINDOW, MICRO_BATCHES, SEED = 131_072, 4, 4
FIRST, STEPS = 4, 5  # steps shown
COLOURS = {"now": "#7aa6c2", "late": "#d97b4a", "early": "#78b37e"}


def draw_curves(curves: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Imbalance over token delay, one panel a corpus."""
    pyplot = _pyplot()
    columns = min(4, len(curves))
    rows = -(-len(curves) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(3.6 * columns, 3 * rows), squeeze=False)
    for panel in panels.flat[len(curves) :]:
        panel.axis("off")
    for panel, (title, points) in zip(panels.flat, curves.items(), strict=False):
        for packer, colour in (("variable_length", "#d97b4a"), ("makespan", "#2f6690"), ("sequential", "#555555")):
            line = front([point for point in points if point.packer == packer], "imbalance")
            panel.plot([p.delay for p in line], [p.imbalance for p in line], "o-", color=colour, ms=3, label=packer)
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("mean token delay, steps", fontsize=8)
        panel.set_ylabel("imbalance degree", fontsize=8)
    panels.flat[0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def draw_example(path: Path) -> None:
    """The same steps of the same documents, before and after."""
    lengths = sample_lengths(4000, WINDOW, SEED).tolist()
    workload = make_workload("7b", "h100", tp=8, cp=2)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(2, STEPS, figsize=(11, 5.2), sharey=True)
    for row, packer in zip(panels, ("variable_length", "makespan"), strict=True):
        planner = make_packer(packer, micro_batches=MICRO_BATCHES, context_window=WINDOW, workload=workload)
        plans = planner.plan(lengths)[FIRST : FIRST + STEPS]
        for panel, plan in zip(row, plans, strict=True):
            _draw_step(panel, plan, starts, workload, looks_ahead=packer == "makespan")
        row[0].set_ylabel(f"{packer}\npredicted seconds", fontsize=9)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    words = ["of this global batch", "waited for this step", "taken early from the next"]
    figure.legend(handles, words, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_step(panel: Any, plan: StepPlan, starts: Sequence[int], workload: Workload, *, looks_ahead: bool) -> None:
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


def _pyplot() -> Any:
    require("matplotlib", "plot").use("Agg")
    return require("matplotlib.pyplot", "plot")


if __name__ == "__main__":
    draw_example(Path(sys.argv[1]))
