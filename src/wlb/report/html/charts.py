"""Charts: document lengths, bars, intervals and lines over steps."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.report.bootstrap import Gain
from wlb.report.html.markup import (
    LETTER,
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
from wlb.workload.flops import attended_pairs

_ROW = 30.0
_MOST_POINTS = 500  # of a line; more than the eye tells apart


def _compact(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def length_histogram(lengths: NDArray[np.int64]) -> Markup:
    """Share of documents, of tokens and of attention by octave of length."""
    octave = np.ceil(np.log2(lengths)).astype(np.int64)
    first = int(octave.min())
    count = int(octave.max()) - first + 1
    weights = (np.ones(len(lengths)), lengths.astype(np.float64), attended_pairs(lengths))
    shares = [np.bincount(octave - first, weight, count) / weight.sum() for weight in weights]
    series = (("count", "documents"), ("tokens", "tokens"), ("attention", "attention"))

    left, right = 44.0, WIDTH - 8
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
    shapes.append(text((left + right) / 2, bottom + 33, label, "middle", "tick"))
    longest = int(np.searchsorted(np.cumsum(np.sort(attended_pairs(lengths))), 0.5 * attended_pairs(lengths).sum()))
    half = len(lengths) - longest
    described = (
        f"{half / len(lengths):.2%} of the documents, those of {np.sort(lengths)[longest]:,} tokens and more, "
        "are half of all attention."
    )
    note = f"{len(lengths):,} documents, {_short(int(lengths.sum()))} tokens. {described}"
    return figure(Caption("lengths", "Document lengths", note), described, bottom + 42, shapes)


def bars(
    caption: Caption, rows: Sequence[tuple[str, Sequence[float], str]], label: str, parts: Sequence[str]
) -> Markup:
    """One bar a row (name, values, total as shown): the shares of ``parts``, which are written in tooltips."""

    def draw_row(index: int, scale: Scale, middle: float) -> list[Markup]:
        name, values, shown = rows[index]
        shapes, start = [], 0.0
        for number, (part, value) in enumerate(zip(parts, values, strict=True)):
            x = scale(start)
            start += value
            hint = f"{name}, {part}: {value:.1%}"
            shapes.append(box(x, middle - 10, scale(start) - x, _ROW - 10, f"part-{number}", hint))
        return [*shapes, text(scale(start) + 6, middle + 4, shown)]

    longest = max(sum(values) for _, values, _ in rows)
    return _rows(caption, [(name, shown) for name, _, shown in rows], (0.0, longest), label, draw_row, parts)


def intervals(caption: Caption, rows: Sequence[tuple[str, Gain]], label: str) -> Markup:
    """A dot for each gain and a line over its interval."""
    low, high = min(1.0, *(g.low for _, g in rows)), max(1.0, *(g.high for _, g in rows))
    margin = 0.04 * (high - low) or 0.01

    def draw_row(index: int, scale: Scale, middle: float) -> list[Markup]:
        name, g = rows[index]
        return [
            line(scale(1.0), middle - _ROW / 2, scale(1.0), middle + _ROW / 2),
            line(scale(g.low), middle, scale(g.high), middle, "whisker"),
            tag("circle", tag("title", f"{name}: {g}"), cx=scale(g.factor), cy=middle, r=5, class_="fill-after"),
            text(scale.stop + 8, middle + 4, str(g)),
        ]

    shown = [(name, str(g)) for name, g in rows]
    return _rows(caption, shown, (low - margin, high + margin), label, draw_row)


def _rows(
    caption: Caption,
    rows: Sequence[tuple[str, str]],
    span: tuple[float, float],
    label: str,
    draw_row: Callable[[int, Scale, float], list[Markup]],
    parts: Sequence[str] = (),
) -> Markup:
    """Rows (name, value as shown) over one axis, with room for the longest of both beside it.

    ``draw_row`` gets the row's index, the axis and where the middle of the row is.
    """

    left, room = (12 + LETTER * max(map(len, column)) for column in zip(*rows, strict=True))
    right = WIDTH - room
    shapes, end = legend([(f"part-{n}", part) for n, part in enumerate(parts)], 10, 12 if parts else -6, WIDTH - 10)
    top, bottom = end + 8, end + 8 + _ROW * len(rows)
    scale = Scale(*span, left, right)
    axis, end = bottom_axis(scale, top, bottom, _compact, label)
    shapes += axis
    for index, (name, _) in enumerate(rows):
        middle = top + _ROW * (index + 0.5)
        shapes += [text(left - 8, middle + 4, name, "end"), *draw_row(index, scale, middle)]
    return figure(caption, "; ".join(f"{name}: {shown}" for name, shown in rows), end, shapes)


def series(caption: Caption, runs: Sequence[tuple[str, str, NDArray[np.float64], NDArray[np.float64]]]) -> Markup:
    """A line for each run (name, class, steps, values); many steps are averaged to a few hundred points."""
    runs = [(name, class_, _thinned(at), _thinned(of)) for name, class_, at, of in runs]
    values = np.concatenate([run[3] for run in runs])
    steps = np.concatenate([run[2] for run in runs])

    left, right = 52.0, WIDTH - 10
    shapes, end = legend([(f"fill-{class_}", name) for name, class_, _, _ in runs], left, 14, right)
    top, bottom = end + 10, end + 180
    heights = Scale(0.0, float(values.max()) or 1.0, bottom, top)
    across = Scale(float(steps.min()), float(steps.max()), left, right)
    axis, end = bottom_axis(across, bottom, bottom, _whole, "step")
    shapes += [*left_axis(heights, left, right, _compact), *axis]
    for _, class_, at, of in runs:
        points = " ".join(f"{across(x):.1f},{heights(y):.1f}" for x, y in zip(at.tolist(), of.tolist(), strict=True))
        shapes.append(tag("polyline", points=points, class_=f"stroke-{class_}"))
    described = "; ".join(f"{name}: {_compact(of.min())} to {_compact(of.max())}" for name, _, _, of in runs)
    return figure(caption, described, end, shapes)


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
