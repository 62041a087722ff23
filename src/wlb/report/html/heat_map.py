"""Seconds of every GPU, side by side for several systems, as WLB-LLM's Figure 1 shows them.

Each panel is one system: rows are pipeline ranks, columns context-parallel ranks inside data-parallel ones. Colour is
the seconds over the panel's mean, on one scale for all. Cells of a colour share one path, so that a map of
100,000 GPUs stays small.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.report.html.markup import Markup, tag
from wlb.report.html.svg import WIDTH, box, figure, text

SHADES = 21  # odd: the middle one is the mean
_MAP_LEFT, _MAP_RIGHT = 70.0, WIDTH - 10
_LEAST_REACH = 0.05  # of the mean, at the ends of the colour scale: less is not worth a colour


def heat_map(
    identifier: str, title: str, panels: Sequence[tuple[str, NDArray[np.float64]]], unit: str, note: str
) -> Markup:
    """``panels`` are (name, seconds of shape (pp, dp, cp)); ``unit`` says what the seconds are."""
    relative = [(name, seconds / seconds.mean()) for name, seconds in panels]
    reach = max(_LEAST_REACH, *(float(np.abs(values - 1).max()) for _, values in relative))
    shapes: list[Markup] = []
    top = 20.0
    for (name, values), (_, seconds) in zip(relative, panels, strict=True):
        shapes.append(text(_MAP_LEFT, top, f"{name}: slowest {values.max():.2f} of the mean {seconds.mean():.3g} s"))
        top = _panel(shapes, values, reach, top + 8) + 30
    _colour_scale(shapes, reach, top)
    described = "; ".join(
        f"{name}: slowest over mean {values.max():.3f}, {_place(values, int(values.argmax()))}"
        for name, values in relative
    )
    return figure(identifier, title, f"{unit}. {described}", top + 26, shapes, note)


def _panel(shapes: list[Markup], values: NDArray[np.float64], reach: float, top: float) -> float:
    """Draw one panel from ``top``; returns where it ends."""
    pp, dp, cp = values.shape
    gap = min(6.0, 0.2 * (_MAP_RIGHT - _MAP_LEFT) / dp) if cp > 1 and dp > 1 else 0.0
    width = (_MAP_RIGHT - _MAP_LEFT - gap * (dp - 1)) / (dp * cp)
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
    every = max(1, -(-pp // 16))
    shapes += [
        text(_MAP_LEFT - 6, top + (stage + 0.5) * height + 4, f"pp {stage}", "end", "tick")
        for stage in range(0, pp, every)
    ]
    bottom: float = top + pp * height
    for rank in range(0, dp, max(1, -(-dp // 16))):
        x = _MAP_LEFT + rank * (cp * width + gap) + cp * width / 2
        shapes.append(text(x, bottom + 14, f"dp {rank}", "middle", "tick"))
    return bottom + 16


def _colour_scale(shapes: list[Markup], reach: float, top: float) -> None:
    size = 14.0
    left = _MAP_LEFT + 60
    shapes.append(text(left - 8, top + 11, f"{1 - reach:.2f}", "end", "tick"))
    shapes += [box(left + size * shade, top, size + 0.3, size, f"heat-{shade}") for shade in range(SHADES)]
    shapes.append(text(left + size * SHADES + 8, top + 11, f"{1 + reach:.2f} of the mean GPU", "start", "tick"))


def _place(values: NDArray[np.float64], index: int) -> str:
    pp, dp, cp = np.unravel_index(index, values.shape)
    return f"at pp {pp}, dp {dp}, cp {cp}"
