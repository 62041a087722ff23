"""HTML and SVG that escape by construction: plain text goes in, ``Markup`` comes out.

``tag`` escapes every child and attribute that is not ``Markup`` already, so a file name or a host cannot become an
element of the page. ``figure`` is what all charts share: an accessible ``<svg>`` that scales with the page, with text,
boxes, lines and axes in it, drawn once for wide and once for narrow screens. Colours are classes, not values; ``page``
defines them once for light and once for dark.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDE, NARROW = 720.0, 360.0  # of every chart, in the units of its coordinates: about one pixel on each screen
_LETTER = 6.4  # mean width of one in a chart
LINE = 15.0  # from one line of text to the next
_VOID = {"meta", "br"}


class Markup(str):
    """Text that is HTML already. Only ``tag``, ``join`` and constants of this package make it."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float) -> Markup:
    """``<name attributes>children</name>``; an underscore in an attribute's name is a hyphen, a last one nothing."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"' for key, value in attributes.items()
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Markup:
    """All parts one after another, those that are plain text escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Markup:
    """A table whose first column names the row."""
    head = tag("tr", *(tag("th", heading, scope="col") for heading in headings))
    body = (tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows)
    shown = tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="wide")
    # Beside the table and not in it: a table may be wider than the screen, its caption is not.
    return join([*([tag("p", caption, class_="muted")] if caption else []), shown])


@dataclass(frozen=True)
class Scale:
    """A linear map of ``low`` .. ``high`` to the coordinates ``start`` .. ``stop``."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (value - self.low) * (self.stop - self.start) / (span or 1.0)

    def ticks(self, wanted: int = 5) -> list[float]:
        """About ``wanted`` round values in the range."""
        span = self.high - self.low
        if not span > 0:
            return [self.low]
        raw = span / wanted
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


Drawing = Callable[[float], tuple[float, Sequence[Markup]]]


def figure(identifier: str, title: str, description: str, draw: Drawing, note: str) -> Markup:
    """A chart with its caption: ``title`` and ``description`` are what a screen reader says in its place.

    ``draw`` gets a width, ``WIDE`` or ``NARROW``, and returns the height and the shapes of the chart at that width.
    """
    pictures = []
    for class_, width in (("wide-chart", WIDE), ("narrow-chart", NARROW)):
        height, shapes = draw(width)
        name = identifier if width == WIDE else f"{identifier}-narrow"
        picture = tag(
            "svg",
            tag("title", title, id=f"{name}-title"),
            tag("desc", description, id=f"{name}-description"),
            *shapes,
            viewBox=f"0 0 {width:.0f} {height:.0f}",
            role="img",
            aria_labelledby=f"{name}-title {name}-description",
            class_=f"chart {class_}",
            id=name,
        )
        pictures.append(picture)
    return tag("figure", *pictures, tag("figcaption", tag("b", title), ". ", note))


def text(x: float, y: float, content: str, anchor: str = "start", class_: str = "label") -> Markup:
    return tag("text", content, x=x, y=y, text_anchor=anchor, class_=class_)


def box(x: float, y: float, width: float, height: float, class_: str, tooltip: str = "") -> Markup:
    hint = [tag("title", tooltip)] if tooltip else []
    return tag("rect", *hint, x=x, y=y, width=max(0.0, width), height=max(0.0, height), class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str = "axis") -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def bottom_axis(
    scale: Scale, top: float, bottom: float, show: Callable[[float], str], label: str, width: float
) -> tuple[list[Markup], float]:
    """Grid lines from ``top`` to ``bottom``, their values and what they are; and where all that ends."""
    shapes: list[Markup] = []
    for value in scale.ticks(5 if width == WIDE else 3):
        shapes += [
            line(scale(value), top, scale(value), bottom, "grid"),
            text(scale(value), bottom + 15, show(value), "middle", "tick"),
        ]
    lines = textwrap.wrap(label, int(width / _LETTER))
    middle = (scale.start + scale.stop) / 2 if len(lines) == 1 and width == WIDE else width / 2
    shapes += [
        text(middle, bottom + 18 + LINE * number, line_, "middle", "tick") for number, line_ in enumerate(lines, 1)
    ]
    return shapes, bottom + 26 + LINE * len(lines)


def left_axis(scale: Scale, left: float, right: float, show: Callable[[float], str]) -> list[Markup]:
    """Grid lines from ``left`` to ``right`` and their values."""
    shapes: list[Markup] = []
    for value in scale.ticks():
        shapes += [
            line(left, scale(value), right, scale(value), "grid"),
            text(left - 6, scale(value) + 4, show(value), "end", "tick"),
        ]
    return shapes


def legend(entries: Sequence[tuple[str, str]], left: float, y: float, right: float) -> tuple[list[Markup], float]:
    """Swatches of (class, name) in rows between ``left`` and ``right``; and where they end."""
    shapes: list[Markup] = []
    x = left
    for class_, name in entries:
        size = 16 + _LETTER * len(name) + 14
        if x > left and x + size - 14 > right:
            x, y = left, y + 18
        shapes += [box(x, y - 9, 11, 11, class_), text(x + 16, y + 1, name)]
        x += size
    return shapes, y + 6


def _text(value: str | float) -> str:
    """Coordinates with two decimals: a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
