"""When every pipeline rank runs which forward and backward of a step, on one clock for several systems."""

from __future__ import annotations

from collections.abc import Sequence

from wlb.report.html.markup import Markup, tag
from wlb.report.html.svg import WIDTH, Scale, bottom_axis, figure, legend, text
from wlb.simulate.timeline import Timeline

_LEFT, _RIGHT = 90.0, WIDTH - 14
_NAMED_WIDTH = 13.0  # a box as wide as this has room for the number of its micro-batch
_ROWS_OF_ALL = 16  # up to as many rows all pipelines are drawn, beyond it the slowest only
_KINDS = ("idle", "forward", "backward")


def pipeline_chart(identifier: str, title: str, steps: Sequence[tuple[str, Timeline]], note: str) -> Markup:
    """One block of rows for each (name, step)."""
    scale = Scale(0, max(step.seconds for _, step in steps), _LEFT, _RIGHT)
    names = ("waiting", "forward", "backward")
    shapes = legend([(f"fill-{kind}", name) for kind, name in zip(_KINDS, names, strict=True)], _LEFT, 14)
    top = 52.0
    described = []
    for name, step in steps:
        busy = float((step.ends - step.starts).sum() / (step.seconds * step.job.pp * step.job.dp))
        described.append(f"{name}: {step.seconds:.3g} s for {step.plan.tokens:,} tokens, pipelines busy {busy:.0%}")
        shapes.append(text(_LEFT, top - 8, described[-1]))
        top = _pipelines(shapes, step, scale, top) + 32
    shapes += bottom_axis(scale, top - 30, top - 26, lambda seconds: f"{seconds:.3g}", "seconds")
    return figure(identifier, title, "; ".join(described), top + 16, shapes, note)


def _pipelines(shapes: list[Markup], step: Timeline, scale: Scale, top: float) -> float:
    pp, dp = step.job.pp, step.job.dp
    slowest = int(step.rank_ends.max(axis=0).argmax())
    height = 20.0 if pp <= 8 else 13.0
    for pipeline in range(dp) if dp * pp <= _ROWS_OF_ALL else [slowest]:
        boxes: dict[str, list[str]] = {kind: [] for kind in _KINDS}
        numbers: list[Markup] = []
        for rank in range(pp):
            y = top + rank * height
            boxes["idle"].append(_outline(scale(0), y, scale(step.seconds), height))
            shown = f"dp {pipeline} pp {rank}" if dp > 1 else f"pp {rank}"
            shapes.append(text(_LEFT - 6, y + height / 2 + 4, shown, "end", "tick"))
        spans = zip(step.starts[:, pipeline].tolist(), step.ends[:, pipeline].tolist(), strict=True)
        for operation, rank, (start, end) in zip(step.operations, step.pipeline_ranks, spans, strict=True):
            left, right, y = scale(start), scale(end), top + rank * height
            boxes["backward" if operation.backward else "forward"].append(_outline(left, y, right, height))
            if right - left >= _NAMED_WIDTH and height >= 16:
                middle = text((left + right) / 2, y + height / 2 + 3, str(operation.micro_batch), "middle", "inside")
                numbers.append(middle)
        shapes += [tag("path", d="".join(paths), class_=f"fill-{kind} cell") for kind, paths in boxes.items()]
        shapes += numbers
        top += pp * height + 6
    return top


def _outline(left: float, top: float, right: float, height: float) -> str:
    return f"M{left:.1f} {top:.0f}H{right:.1f}v{height - 2:.0f}H{left:.1f}z"
