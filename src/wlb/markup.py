"""HTML that escapes by construction, and the tables with bars that notebooks show of plans and results.

``tag`` escapes every child and attribute that is not ``Markup`` already, so a file name or a host cannot become an
element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

# Of bars in notebooks: seen on white and on black alike, as nothing tells which of them a notebook has.
COLOURS = {
    "orange": "#d1602b",
    "yellow": "#a9821c",
    "pink": "#c2558a",
    "purple": "#8a6cc9",
    "grey": "#7a8794",
    "green": "#2b9470",
}

_VOID = {"meta", "br"}
_MOST_ROWS = 32
_LANE = 10  # pixels from one bar of a row to the next
_CELL = "border:0;padding:3px 0 3px 8px;vertical-align:middle;"


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


def bar_table(
    heading: str,
    columns: Mapping[str, Sequence[str]],
    lanes: Sequence[Sequence[Mapping[str, float]]],
    colours: Mapping[str, str],
) -> Markup:
    """A table with bars in every row, which needs no style sheet and has the text colour of the notebook around it.

    Args:
        heading: What stands above the table.
        columns: Cells by heading; the first column names the rows.
        lanes: Bars below each other in a row. A lane has for every row the values of its parts, by name, and one scale.
        colours: Of every part's name, in the order of the legend; keys of ``COLOURS``.

    Only the first 32 rows are shown, and those that follow are counted.
    """
    first, *others = columns
    head = [_cell("th", first, "left"), tag("th", style=_CELL), *(_cell("th", other) for other in others)]
    scales = [max((sum(parts.values()) for parts in lane), default=0) or 1 for lane in lanes]
    rows = []
    for index, (name, *figures) in enumerate(list(zip(*columns.values(), strict=True))[:_MOST_ROWS]):
        bars = _bars([lane[index] for lane in lanes], scales, colours)
        row = [_cell("th", name, "left;white-space:nowrap"), tag("td", bars, style=f"{_CELL}width:100%")]
        rows.append(tag("tr", *row, *(_cell("td", figure) for figure in figures)))
    left_out = len(columns[first]) - len(rows)
    legend = [
        join([tag("span", "■", style=f"color:{COLOURS[colour]}"), f" {name}  "]) for name, colour in colours.items()
    ]
    return tag(
        "div",
        tag("div", tag("b", heading)),
        tag("div", *legend),
        tag(
            "table",
            tag("thead", tag("tr", *head, style="background:none")),
            tag("tbody", *rows),
            style="width:100%;max-width:720px;margin:4px 0;table-layout:auto;border-collapse:collapse;"
            "font-size:.9em;font-variant-numeric:tabular-nums",
        ),
        *([tag("div", f"and {left_out:,} more")] if left_out else []),
        style="max-width:100%;overflow-x:auto",
    )


def _cell(name: str, content: str, align: str = "right") -> Markup:
    style = f"{_CELL}text-align:{align};font-weight:{'normal' if name == 'td' else 'bold'}"
    return tag(name, content, style=style)


def _bars(lanes: Sequence[Mapping[str, float]], scales: Sequence[float], colours: Mapping[str, str]) -> Markup:
    """The bars of one row."""
    shapes = []
    for lane, (parts, scale) in enumerate(zip(lanes, scales, strict=True)):
        start = 0.0
        for name, value in parts.items():
            width = max(0.0, 100 * value / scale)
            hint = tag("title", f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value:.3g}")
            place = {"x": f"{start:.2f}%", "y": f"{lane * _LANE}", "width": f"{width:.2f}%", "height": f"{_LANE - 2}"}
            shapes.append(tag("rect", hint, **place, fill=COLOURS[colours[name]]))
            start += width
    style = "display:block;min-width:70px"
    return tag("svg", *shapes, width="100%", height=_LANE * len(lanes) - 2, style=style)


def _text(value: str | float) -> str:
    """Coordinates with two decimals: a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
