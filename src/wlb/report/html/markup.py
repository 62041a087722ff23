"""HTML that escapes by construction, and what tables and charts of a page share.

``tag`` escapes every child and attribute that is not ``Markup`` already. ``figure`` is an accessible ``<svg>`` that
scales with the page, with text, boxes, lines and axes in it. Colours are classes, not values; ``page`` defines them
once for light and once for dark.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

WIDTH = 440.0  # of every chart, in the units of its coordinates: somewhat less than a pixel on a phone, more on a desk
LETTER = 7.4  # mean width of one in a chart, in a wide font
_VOID = {"meta", "br"}  # without an end tag


class Markup(str):
    """Text that is HTML already. Only ``tag``, ``join`` and constants of this package make it."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float) -> Markup:
    """``<name attributes>children</name>``; an underscore in an attribute's name is a hyphen, a last one nothing."""
    written = ""
    for key, value in attributes.items():
        # Coordinates have two decimals: a hundredth of a pixel.
        text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
        written += f' {key.rstrip("_").replace("_", "-")}="{escape(text)}"'
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Markup:
    """All parts one after another, those that are plain text escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def table(columns: Mapping[str, Sequence[str]], caption: str = "") -> Markup:
    """A table of ``columns``, by heading; the first one names the rows."""
    head = tag("tr", *(tag("th", heading, scope="col") for heading in columns))
    rows = zip(*columns.values(), strict=True)
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

    def ticks(self) -> list[float]:
        """About five round values in the range."""
        span = self.high - self.low
        if not span > 0:
            return [self.low]
        raw = span / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


class Caption(NamedTuple):
    """What stands below a chart; ``identifier`` is its place in the page."""

    identifier: str
    title: str
    note: str


def figure(caption: Caption, description: str, height: float, shapes: Iterable[Markup]) -> Markup:
    """A chart with its caption: title and ``description`` are what a screen reader says in its place."""
    name = caption.identifier
    picture = tag(
        "svg",
        tag("title", caption.title, id=f"{name}-title"),
        tag("desc", description, id=f"{name}-description"),
        *shapes,
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
        role="img",
        aria_labelledby=f"{name}-title {name}-description",
        class_="chart",
        id=name,
    )
    return tag("figure", picture, tag("figcaption", tag("b", caption.title), ". ", caption.note))


def text(x: float, y: float, content: str, anchor: str = "start", class_: str = "label") -> Markup:
    return tag("text", content, x=x, y=y, text_anchor=anchor, class_=class_)


def box(x: float, y: float, width: float, height: float, class_: str, tooltip: str = "") -> Markup:
    hint = [tag("title", tooltip)] if tooltip else []
    return tag("rect", *hint, x=x, y=y, width=max(0.0, width), height=max(0.0, height), class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str = "axis") -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def bottom_axis(
    scale: Scale, top: float, bottom: float, show: Callable[[float], str], label: str
) -> tuple[list[Markup], float]:
    """Grid lines from ``top`` to ``bottom``, their values and what they are; and where all that ends."""
    shapes: list[Markup] = []
    for value in scale.ticks():
        shapes += [
            line(scale(value), top, scale(value), bottom, "grid"),
            text(scale(value), bottom + 15, show(value), "middle", "tick"),
        ]
    middle = (scale.start + scale.stop) / 2
    return [*shapes, text(middle, bottom + 33, label, "middle", "tick")], bottom + 41


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
        size = 16 + LETTER * len(name) + 14
        if x > left and x + size - 14 > right:
            x, y = left, y + 18
        shapes += [box(x, y - 9, 11, 11, class_), text(x + 16, y + 1, name)]
        x += size
    return shapes, y + 6
