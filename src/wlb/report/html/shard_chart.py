"""What every context-parallel rank attends under several shard plans of one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.report.html.markup import Markup
from wlb.report.html.svg import WIDTH, Scale, box, figure, left_axis, legend, line, text
from wlb.sharding.plan import ShardPlan
from wlb.workload.flops import attended_pairs

_NAMED_DOCUMENTS = 5


def shard_chart(identifier: str, title: str, plans: Sequence[ShardPlan], note: str) -> Markup:
    """A panel for each of ``plans``: the attended area of its ranks over the mean rank, by document."""
    lengths = np.asarray(plans[0].segment_lengths)
    longest = np.argsort(-lengths, kind="stable")[:_NAMED_DOCUMENTS]
    areas = [attended_areas(plan) for plan in plans]
    top, bottom, left = 62.0, 250.0, 44.0
    heights = Scale(0, max(float(area.sum(axis=1).max()) for area in areas), bottom, top)
    entries = [(f"part-{n}", f"{lengths[segment]:,} tokens") for n, segment in enumerate(longest)]
    if len(lengths) > len(longest):
        entries.append(("fill-before", f"{len(lengths) - len(longest)} shorter"))
    shapes = [*legend(entries, left, 14), *left_axis(heights, left, WIDTH - 10, lambda value: f"{value:.2g}")]
    slot = (WIDTH - 10 - left) / len(plans)
    described = []
    for index, (plan, area) in enumerate(zip(plans, areas, strict=True)):
        x = left + index * slot + 8
        summary = f"largest {area.sum(axis=1).max():.2f}, K/V sent {plan.kv_gather_fraction:.0%}"
        described.append(f"{plan.strategy}: {summary}")
        shapes += [text(x, top - 22, plan.strategy), text(x, top - 8, summary, class_="tick")]
        width = (slot - 16) / plan.cp_size
        for rank in range(plan.cp_size):
            shapes += _rank(area[rank], longest, heights, x + rank * width, width)
            if plan.cp_size <= 8:
                shapes.append(text(x + (rank + 0.5) * width, bottom + 14, str(rank), "middle", "tick"))
    shapes += [line(left, heights(1), WIDTH - 10, heights(1)), text(WIDTH / 2, bottom + 32, "rank", "middle", "tick")]
    return figure(identifier, title, "; ".join(described), bottom + 40, shapes, note)


def attended_areas(plan: ShardPlan) -> NDArray[np.float64]:
    """Query-key pairs of every rank in every document over those of the mean rank; shape (cp, documents)."""
    area = np.zeros((plan.cp_size, len(plan.segment_lengths)))
    for rank, table in enumerate(plan.pieces):
        segment, start, stop = table.T
        np.add.at(area[rank], segment, attended_pairs(stop) - attended_pairs(start))
    relative: NDArray[np.float64] = area / (area.sum() / plan.cp_size)
    return relative


def _rank(
    area: NDArray[np.float64], longest: NDArray[np.int64], heights: Scale, x: float, width: float
) -> list[Markup]:
    """One bar: the longest documents from below, then all others together."""
    named = area[longest].tolist()
    shapes, base = [], 0.0
    for class_, value in [
        *((f"part-{n}", v) for n, v in enumerate(named)),
        ("fill-before", float(area.sum()) - sum(named)),
    ]:
        if value > 0:
            y = heights(base + value)
            shapes.append(box(x, y, 0.88 * width, heights(base) - y, class_, f"{value:.3f} of the mean rank"))
        base += value
    return shapes
