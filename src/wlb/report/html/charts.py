"""Charts: document lengths, bars, intervals and lines over steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.report.gain import Gain
from wlb.report.html.markup import WIDE, Markup, Scale, bottom_axis, box, figure, left_axis, legend, line, tag, text
from wlb.workload.flops import attended_pairs

_ROW = 30.0
_MOST_POINTS = 500  # of a line; more than the eye tells apart


def _names_and_values(width: float) -> tuple[float, float]:
    """Where horizontal bars begin and end: names stand on the left, values on the right."""
    return (160.0, width - 96.0) if width == WIDE else (148.0, width - 54.0)


def length_histogram(lengths: NDArray[np.int64]) -> Markup:
    """Share of documents, of tokens and of attention by octave of length."""
    octave = np.ceil(np.log2(lengths)).astype(np.int64)
    first = int(octave.min())
    count = int(octave.max()) - first + 1
    weights = (np.ones(len(lengths)), lengths.astype(np.float64), attended_pairs(lengths))
    shares = [np.bincount(octave - first, weight, count) / weight.sum() for weight in weights]
    series = (("count", "documents"), ("tokens", "tokens"), ("attention", "attention"))

    def draw(width: float) -> tuple[float, list[Markup]]:
        left, right = 44.0, width - 8
        entries = [(f"fill-{class_}", f"share of {name}") for class_, name in series]
        shapes, end = legend(entries, left, 14, right)
        top, bottom = end + 14, end + 214
        heights = Scale(0, max(float(share.max()) for share in shares), bottom, top)
        slot = (right - left) / count
        shapes += left_axis(heights, left, right, lambda share: f"{share:.0%}")
        for index in range(count):
            most = _short(2 ** (first + index))
            if index % -(-42 // int(slot)) == 0:
                shapes.append(text(left + slot * (index + 0.5), bottom + 15, f"≤ {most}", "middle", "tick"))
            for place, ((class_, name), share) in enumerate(zip(series, shares, strict=True)):
                x = left + slot * (index + 0.12 + 0.253 * place)
                y = heights(float(share[index]))
                hint = f"documents up to {most} tokens: {share[index]:.1%} of {name}"
                shapes.append(box(x, y, 0.24 * slot, bottom - y, f"fill-{class_}", hint))
        label = "tokens of a document (to the next power of two)"
        return bottom + 42, [*shapes, text((left + right) / 2, bottom + 33, label, "middle", "tick")]

    longest = int(np.searchsorted(np.cumsum(np.sort(attended_pairs(lengths))), 0.5 * attended_pairs(lengths).sum()))
    half = len(lengths) - longest
    described = (
        f"{half / len(lengths):.2%} of the documents, those of {np.sort(lengths)[longest]:,} tokens and more, "
        "are half of all attention."
    )
    note = f"{len(lengths):,} documents, {_short(int(lengths.sum()))} tokens. {described}"
    return figure("lengths", "Document lengths", described, draw, note)


def bars(
    identifier: str,
    title: str,
    rows: Sequence[tuple[str, float, str]],
    label: str,
    note: str,
    *,
    origin: float = 0.0,
    highlights: Collection[str] = (),
) -> Markup:
    """One bar a row (name, value, value as shown) from ``origin``; rows named in ``highlights`` stand out."""

    def draw(width: float) -> tuple[float, list[Markup]]:
        left, right = _names_and_values(width)
        top, bottom = 8.0, 8.0 + _ROW * len(rows)
        scale = Scale(origin, max(max(value for _, value, _ in rows), origin + 1e-3), left, right)
        shapes, end = bottom_axis(scale, top, bottom, _compact, label, width)
        for index, (name, value, shown) in enumerate(rows):
            y = top + _ROW * index + 5
            class_ = "fill-after" if name in highlights else "fill-before"
            shapes += [
                text(left - 8, y + 14, name, "end"),
                box(left, y, scale(value) - left, _ROW - 10, class_, f"{name}: {shown}"),
                text(scale(value) + 6, y + 14, shown),
            ]
        return end, shapes

    described = "; ".join(f"{name}: {shown}" for name, _, shown in rows)
    return figure(identifier, title, described, draw, note)


def stacked(
    identifier: str,
    title: str,
    rows: Sequence[tuple[str, Sequence[float], str]],
    parts: Sequence[str],
    label: str,
    note: str,
    show: Callable[[float], str],
) -> Markup:
    """One bar a row (name, value of each of ``parts``, total as shown), its parts one after another."""

    def draw(width: float) -> tuple[float, list[Markup]]:
        left, right = _names_and_values(width)
        entries = [(f"part-{index}", part) for index, part in enumerate(parts)]
        shapes, end = legend(entries, 10, 12, width - 10)
        top, bottom = end + 8, end + 8 + _ROW * len(rows)
        scale = Scale(0, max(sum(values) for _, values, _ in rows), left, right)
        axis, end = bottom_axis(scale, top, bottom, _compact, label, width)
        shapes += axis
        for index, (name, values, total) in enumerate(rows):
            y = top + _ROW * index + 5
            shapes.append(text(left - 8, y + 14, name, "end"))
            start = 0.0
            for number, (part, value) in enumerate(zip(parts, values, strict=True)):
                hint = f"{name}, {part}: {show(value)}"
                x = scale(start)
                shapes.append(box(x, y, scale(start + value) - x, _ROW - 10, f"part-{number}", hint))
                start += value
            shapes.append(text(scale(start) + 6, y + 14, total))
        return end, shapes

    described = "; ".join(f"{name}: {total}" for name, _, total in rows)
    return figure(identifier, title, described, draw, note)


def intervals(identifier: str, title: str, rows: Sequence[tuple[str, Gain]], label: str, note: str) -> Markup:
    """A dot for each gain and a line over its interval."""
    low, high = min(1.0, *(g.low for _, g in rows)), max(1.0, *(g.high for _, g in rows))
    margin = 0.04 * (high - low) or 0.01

    def draw(width: float) -> tuple[float, list[Markup]]:
        left, right = _names_and_values(width)
        if width == WIDE:
            right -= 50  # the interval is written too
        top, bottom = 8.0, 8.0 + _ROW * len(rows)
        scale = Scale(low - margin, high + margin, left, right)
        shapes, end = bottom_axis(scale, top, bottom, _compact, label, width)
        shapes.append(line(scale(1.0), top, scale(1.0), bottom))
        for index, (name, g) in enumerate(rows):
            y = top + _ROW * (index + 0.5)
            shapes += [
                text(left - 8, y + 4, name, "end"),
                line(scale(g.low), y, scale(g.high), y, "whisker"),
                tag("circle", tag("title", f"{name}: {g}"), cx=scale(g.factor), cy=y, r=5, class_="fill-after"),
                text(right + 8, y + 4, str(g) if width == WIDE else f"{g.factor:.2f}x"),
            ]
        return end, shapes

    described = "; ".join(f"{name}: {g}" for name, g in rows)
    return figure(identifier, title, described, draw, note)


def series(
    identifier: str,
    title: str,
    runs: Sequence[tuple[str, str, NDArray[np.float64], NDArray[np.float64]]],
    label: str,
    note: str,
) -> Markup:
    """A line for each run (name, class, steps, values); many steps are averaged to a few hundred points."""
    runs = [(name, class_, _thinned(at), _thinned(of)) for name, class_, at, of in runs]
    values = np.concatenate([run[3] for run in runs])
    steps = np.concatenate([run[2] for run in runs])

    def draw(width: float) -> tuple[float, list[Markup]]:
        left, right = 52.0, width - 10
        shapes, end = legend([(f"fill-{class_}", name) for name, class_, _, _ in runs], left, 14, right)
        top, bottom = end + 10, end + 180
        heights = Scale(0.0, float(values.max()) or 1.0, bottom, top)
        across = Scale(float(steps.min()), float(steps.max()), left, right)
        shapes += left_axis(heights, left, right, _compact)
        axis, end = bottom_axis(across, bottom, bottom, _whole, f"step; upwards: {label}", width)
        shapes += axis
        for _, class_, at, of in runs:
            points = " ".join(
                f"{across(x):.1f},{heights(y):.1f}" for x, y in zip(at.tolist(), of.tolist(), strict=True)
            )
            shapes.append(tag("polyline", points=points, class_=f"stroke-{class_}"))
        return end, shapes

    described = "; ".join(f"{name}: {_compact(of.min())} to {_compact(of.max())}" for name, _, _, of in runs)
    return figure(identifier, title, described, draw, note)


def _short(number: int) -> str:
    """1024 as 1K, in powers of 1,024 as context windows are named."""
    for power, letter in ((3, "G"), (2, "M"), (1, "K")):
        if number >= 1024**power:
            return f"{number / 1024**power:.3g}{letter}"
    return str(number)


def _thinned(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means of groups of neighbours, at most ``_MOST_POINTS`` of them; the last group may be left out."""
    group = -(-len(values) // _MOST_POINTS)
    thinned: NDArray[np.float64] = values[: len(values) // group * group].reshape(-1, group).mean(axis=1)
    return thinned


def _whole(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else ""


def _compact(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
