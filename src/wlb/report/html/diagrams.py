"""Diagrams of a parallel job: which GPUs take longer, when pipeline ranks wait, and what shards attend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.report.html.escaping import Markup, tag
from wlb.report.html.markup import (
    WIDTH,
    Caption,
    Scale,
    bottom_axis,
    box,
    figure,
    left_axis,
    legend,
    line,
    text,
)
from wlb.report.timeline import Timeline
from wlb.schedules.operations import FORWARD
from wlb.sharding.plan import ShardPlan
from wlb.workload.flops import attended_pairs

SHADES = 21  # odd: the middle one is the mean
_MAP_LEFT = 44.0
_MAP_NAMES = 16  # of pipeline ranks, and of data-parallel ones
_SWATCH = 14.0  # of the colour scale
_LEAST_REACH = 0.05  # of the mean, at the ends of the colour scale: less is not worth a colour
_ROWS_LEFT = 68.0
_NAMED_WIDTH = 13.0  # a box as wide as this has room for the number of its micro-batch
_ROWS_OF_ALL = 16  # up to as many rows all pipelines are drawn, beyond it the slowest only; of level steps the first
_KINDS = ("idle", "forward", "backward")
_NAMED_DOCUMENTS = 5
_FIRST_DOCUMENT = 6  # among the colours of parts, after those of where time goes


def heat_map(caption: Caption, panels: Sequence[tuple[str, NDArray[np.float64]]], unit: str) -> Markup:
    """Seconds of every GPU, side by side for several systems, as WLB-LLM's Figure 1 shows them.

    ``panels`` are (name, seconds of shape (pp, dp, cp)); ``unit`` says what the seconds are. Rows are pipeline ranks,
    columns context-parallel ranks inside data-parallel ones. Colour is the seconds over the panel's mean, on one scale
    for all. Cells of a colour share one path, so that a map of 100,000 GPUs stays small.
    """
    relative = [(name, seconds / seconds.mean()) for name, seconds in panels]
    reach = max(_LEAST_REACH, *(float(np.abs(values - 1).max()) for _, values in relative))

    shapes: list[Markup] = []
    top = 20.0
    for (name, values), (_, seconds) in zip(relative, panels, strict=True):
        shapes.append(text(_MAP_LEFT, top, f"{name}: slowest {values.max():.2f} of the mean {seconds.mean():.3g} s"))
        top = _heat_panel(shapes, values, reach, top + 8) + 30
    left = _MAP_LEFT + 40
    shapes.append(text(left - 8, top + 11, f"{1 - reach:.2f}", "end", "tick"))
    shapes += [box(left + _SWATCH * n, top, _SWATCH + 0.3, _SWATCH, f"heat-{n}") for n in range(SHADES)]
    shapes.append(text(left + _SWATCH * SHADES + 8, top + 11, f"{1 + reach:.2f} of the mean", "start", "tick"))
    described = "; ".join(
        f"{name}: slowest over mean {values.max():.3f}, {_heat_place(values, int(values.argmax()))}"
        for name, values in relative
    )
    return figure(caption, f"{unit}. {described}", top + 26, shapes)


def _heat_panel(shapes: list[Markup], values: NDArray[np.float64], reach: float, top: float) -> float:
    """Draw one panel from ``top``; returns where it ends."""
    pp, dp, cp = values.shape
    across = WIDTH - 8 - _MAP_LEFT
    gap = min(6.0, 0.2 * across / dp) if cp > 1 and dp > 1 else 0.0
    width = (across - gap * (dp - 1)) / (dp * cp)
    height = min(26.0, max(6.0, 240.0 / pp))
    shade = np.rint((values - 1) / reach * (SHADES // 2)).astype(int) + SHADES // 2
    outline = f"h{width:.2f}v{height:.1f}h-{width:.2f}z"
    for value in np.unique(shade).tolist():
        cells = "".join(
            f"M{_MAP_LEFT + (d * cp + c) * width + d * gap:.1f} {top + p * height:.1f}{outline}"
            for p, d, c in np.argwhere(shade == value).tolist()
        )
        middle = 1 + (value - SHADES // 2) * reach / (SHADES // 2)
        shapes.append(tag("path", tag("title", f"about {middle:.2f} of the mean"), d=cells, class_=f"heat-{value}"))
    shapes += [
        text(_MAP_LEFT - 6, top + (stage + 0.5) * height + 4, f"pp {stage}", "end", "tick")
        for stage in range(0, pp, -(-pp // _MAP_NAMES))
    ]
    bottom: float = top + pp * height
    for rank in range(0, dp, -(-dp // _MAP_NAMES)):
        x = _MAP_LEFT + rank * (cp * width + gap) + cp * width / 2
        shapes.append(text(x, bottom + 14, f"dp {rank}", "middle", "tick"))
    return bottom + 16


def _heat_place(values: NDArray[np.float64], index: int) -> str:
    pp, dp, cp = np.unravel_index(index, values.shape)
    return f"at pp {pp}, dp {dp}, cp {cp}"


def pipeline_chart(caption: Caption, steps: Sequence[tuple[str, Timeline]]) -> Markup:
    """When every pipeline rank runs which forward and backward: rows for each (name, step), on one clock."""
    described = []
    for name, step in steps:
        ranks = np.array([[len(micro_batch.ranks) or 1 for micro_batch in of_dp] for of_dp in step.plan.ranks])
        taken = (step.ends - step.starts) * ranks[:, [operation.micro_batch for operation in step.operations]].T
        busy = float(taken.sum() / (step.seconds * step.job.layout.pp * len(step.groups)))
        described.append(f"{name}: {step.seconds:.3g} s, {step.plan.tokens:,} tokens, busy {busy:.0%}")

    scale = Scale(0, max(step.seconds for _, step in steps), _ROWS_LEFT, WIDTH - 10)
    shapes, end = legend([(f"fill-{kind}", kind) for kind in _KINDS], _ROWS_LEFT, 14, WIDTH)
    top = end + 32
    for summary, (_, step) in zip(described, steps, strict=True):
        shapes.append(text(4, top - 8, summary))
        top = _pipelines(shapes, step, scale, top) + 32
    axis, end = bottom_axis(scale, top - 30, top - 26, lambda seconds: f"{seconds:.3g}", "seconds")
    return figure(caption, "; ".join(described), end, [*shapes, *axis])


def _pipelines(shapes: list[Markup], step: Timeline, scale: Scale, top: float) -> float:
    pp, groups = step.job.layout.pp, step.groups
    if len(groups) * pp > _ROWS_OF_ALL:
        slowest = int(step.rank_ends.max(axis=0).argmax())
        groups = groups[:_ROWS_OF_ALL] if step.job.levels_steps else [(slowest, 0)]
    height = 20.0 if pp <= 8 else 13.0
    for dp, cp in groups:
        boxes: dict[str, list[str]] = {kind: [] for kind in _KINDS}
        numbers: list[Markup] = []
        for rank in range(pp):
            y = top + rank * height
            boxes["idle"].append(_outline(scale(0), y, scale(step.seconds), height))
            shown = f"dp {dp} pp {rank}" if step.job.layout.dp > 1 else f"pp {rank}"
            shown = f"cp {cp}" if step.job.levels_steps else shown
            shapes.append(text(_ROWS_LEFT - 6, y + height / 2 + 4, shown, "end", "tick"))
        for index in step.operations_of(dp, cp):
            operation, start, end = step.operations[index], float(step.starts[index, dp]), float(step.ends[index, dp])
            left, right, y = scale(start), scale(end), top + step.pipeline_ranks[index] * height
            boxes["forward" if operation.kind == FORWARD else "backward"].append(_outline(left, y, right, height))
            if right - left >= _NAMED_WIDTH and height >= 16:
                middle = text((left + right) / 2, y + height / 2 + 3, str(operation.micro_batch), "middle", "inside")
                numbers.append(middle)
        shapes += [tag("path", d="".join(paths), class_=f"fill-{kind} cell") for kind, paths in boxes.items()]
        shapes += numbers
        top += pp * height + 6
    return top


def _outline(left: float, top: float, right: float, height: float) -> str:
    return f"M{left:.1f} {top:.0f}H{right:.1f}v{height - 2:.0f}H{left:.1f}z"


def shard_chart(caption: Caption, plans: Sequence[ShardPlan]) -> Markup:
    """What ranks attend under several plans of one micro-batch: attended area over the mean rank, by document."""
    documents, areas = areas_by_document(plans)
    classes = [*(f"part-{_FIRST_DOCUMENT + n}" for n in range(len(documents) - 1)), "fill-before"]
    left, right = 34.0, WIDTH - 10
    slot = (right - left) / len(plans)
    shapes, end = legend([*zip(classes, documents, strict=True)], left, 14, right)
    top, bottom = end + 60, end + 220
    heights = Scale(0, max(float(area.sum(axis=1).max()) for area in areas), bottom, top)
    shapes += left_axis(heights, left, right, lambda value: f"{value:.2g}")
    described = []
    for index, (plan, area) in enumerate(zip(plans, areas, strict=True)):
        x, bar, cp = left + index * slot + 8, (slot - 16) / plan.cp_size, plan.cp_size
        summary = (f"largest {area.sum(axis=1).max():.2f}", f"K/V sent {plan.kv_gather_fraction:.0%}")
        described.append(f"{plan.strategy}: {', '.join(summary)}")
        shapes += [text(x, top - 38, plan.strategy)]
        shapes += [text(x, top - 23 + 14 * n, part, class_="tick") for n, part in enumerate(summary)]
        for rank in range(cp):
            shapes += _shard_bar(area[rank], classes, heights, x + rank * bar, 0.88 * bar)
            if cp <= 8:
                shapes.append(text(x + (rank + 0.5) * bar, bottom + 14, str(rank), "middle", "tick"))
    shapes += [
        line(left, heights(1), right, heights(1)),
        text(WIDTH / 2, bottom + 32, "rank", "middle", "tick"),
    ]
    return figure(caption, "; ".join(described), bottom + 40, shapes)


def _shard_bar(
    area: NDArray[np.float64], classes: Sequence[str], heights: Scale, x: float, width: float
) -> list[Markup]:
    shapes, base = [], 0.0
    for class_, value in zip(classes, area.tolist(), strict=True):
        if value > 0:
            y = heights(base + value)
            shapes.append(box(x, y, width, heights(base) - y, class_, f"{value:.3f} of the mean rank"))
        base += value
    return shapes


def areas_by_document(plans: Sequence[ShardPlan]) -> tuple[list[str], list[NDArray[np.float64]]]:
    """What ranks attend under several plans of one micro-batch, over what the mean rank does.

    Names of the longest documents, the last of them being all others together; and for every plan an array of shape
    (cp, names).
    """
    lengths = np.asarray(plans[0].segment_lengths)
    longest = np.argsort(-lengths, kind="stable")[:_NAMED_DOCUMENTS]
    names = [*(f"{lengths[segment]:,} tokens" for segment in longest), f"{len(lengths) - len(longest)} shorter"]
    areas = []
    for plan in plans:
        area = np.zeros((plan.cp_size, len(lengths)))
        for rank, table in enumerate(plan.pieces):
            segment, start, stop = table.T
            np.add.at(area[rank], segment, attended_pairs(stop) - attended_pairs(start))
        area /= area.sum() / plan.cp_size
        others = area.sum(axis=1) - area[:, longest].sum(axis=1)
        areas.append(np.column_stack([area[:, longest], others]))
    return names, areas
