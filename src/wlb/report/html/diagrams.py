"""Diagrams of a parallel job: when ranks wait, and what shards attend."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.report.html.markup import (
    WIDTH,
    Caption,
    Markup,
    Scale,
    bottom_axis,
    box,
    figure,
    left_axis,
    legend,
    line,
    tag,
    text,
)
from wlb.report.timeline import BUBBLES, EXCHANGE, WAITING, Timeline
from wlb.schedules.operations import FORWARD
from wlb.sharding.plan import ShardPlan
from wlb.simulate.verdict import PARTS
from wlb.workload.flops import attended_pairs

_ROWS_LEFT = 68.0
_NAMED_WIDTH = 13.0  # a box as wide as this has room for the number of its micro-batch
_ROWS_OF_ALL = 16  # up to as many rows all pipelines are drawn, beyond it the slowest only; of level steps the first
_PART = {part: f"part-{number}" for number, part in enumerate(PARTS)}  # its colour in all charts
_OTHER = "other communication and optimizer"
_NAMED_DOCUMENTS = 5
_FIRST_DOCUMENT = 6  # among the colours of parts, after those of where time goes


def pipeline_chart(caption: Caption, steps: Sequence[tuple[str, Timeline]]) -> Markup:
    """What every pipeline rank does, and when: rows for each (name, step), on one clock.

    A box is an operation of a context-parallel group: first the work of its mean rank, then exchange of keys and
    values, then waiting for its slower ranks. In training they alternate, layer by layer.
    """
    described = [
        f"{name}: {step.seconds:.3g} s, {step.plan.tokens:,} tokens, {step.lost:.0%} lost" for name, step in steps
    ]
    scale = Scale(0, max(step.seconds for _, step in steps), _ROWS_LEFT, WIDTH - 10)
    kinds = {"fill-forward": "forward", "fill-backward": "backward"}
    kinds |= {_PART[part]: part for part in (WAITING, BUBBLES, EXCHANGE, _OTHER)}
    shapes, end = legend([*kinds.items()], 4, 14, WIDTH)
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
        for rank in range(pp):
            shown = f"dp {dp} pp {rank}" if step.job.layout.pools > 1 else f"pp {rank}"
            shown = f"cp {cp}" if step.job.levels_steps else shown
            shapes.append(text(_ROWS_LEFT - 6, top + (rank + 0.5) * height + 4, shown, "end", "tick"))
        paths = defaultdict[str, str](str)
        for class_, rank, start, end in _spans(step, dp, cp):
            paths[class_] += f"M{scale(start):.1f} {top + rank * height:.0f}H{scale(end):.1f}v{height - 2:.0f}"
            paths[class_] += f"H{scale(start):.1f}z"
        shapes += [tag("path", d=path, class_=class_) for class_, path in paths.items()]
        for index in step.operations_of(dp, cp):
            left, right = scale(step.starts[index, dp]), scale(step.ends[index, dp])
            if right - left >= _NAMED_WIDTH and height >= 16:
                middle = top + (step.pipeline_ranks[index, dp] + 0.5) * height + 3
                number = str(step.operations[index].micro_batch)
                shapes.append(text((left + right) / 2, middle, number, "middle", "inside"))
        top += pp * height + 6
    return top


def _spans(step: Timeline, dp: int, cp: int) -> Iterator[tuple[str, int, float, float]]:
    """What a group of ranks does: (class, pipeline rank, start, end), each over those before it."""
    pp, mine, parts = step.job.layout.pp, step.operations_of(dp, cp), step.in_operations
    for rank in range(pp):
        # Without a pipeline a rank pauses only until those that it shares a document with are free.
        yield _PART[BUBBLES if pp > 1 else WAITING], rank, 0.0, step.seconds
        own = max((step.ends[index, dp] for index in mine if step.pipeline_ranks[index, dp] == rank), default=0.0)
        met = step.rank_ends[rank].max()
        yield _PART[WAITING], rank, own, met
        yield _PART[_OTHER], rank, met, met + step.reduction[rank] + step.optimizer[rank]
    for index in mine:
        rank, start = int(step.pipeline_ranks[index, dp]), step.starts[index, dp]
        worked = start + parts["work"][index, dp]
        yield _PART[WAITING], rank, start, step.ends[index, dp]
        yield _PART[EXCHANGE], rank, worked, worked + parts[EXCHANGE][index, dp]
        kind = "forward" if step.operations[index].kind == FORWARD else "backward"
        yield f"fill-{kind}", rank, start, worked


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
