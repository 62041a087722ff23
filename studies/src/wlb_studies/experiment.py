"""The interface of every experiment: ``Settings`` in, a ``Report`` of tables, findings and one picture out.

Most pictures are ``grouped_bars``, often of a table's columns, or ``lines_over_tokens``.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from wlb_studies.plots import COLOURS, QUOTED, pyplot_without_display, save

Kind = Literal["", "quoted", "simulated", "measured"]
Value = str | float | None


class Column(NamedTuple):
    """``kind`` says where the numbers come from; columns of names have none."""

    name: str
    kind: Kind = ""
    format: str = ".3f"


class Table(NamedTuple):
    title: str
    columns: tuple[Column, ...]
    rows: list[tuple[Value, ...]]

    def to_json(self) -> dict[str, Any]:
        columns = [{"name": one.name, "kind": one.kind or None, "format": one.format} for one in self.columns]
        return {"title": self.title, "columns": columns, "rows": [list(row) for row in self.rows]}


class Finding(NamedTuple):
    """A statement of the paper, whether it holds here (None: unknown), and the numbers for it."""

    statement: str
    holds: bool | None
    evidence: str


@dataclass(frozen=True)
class Settings:
    """What a user may choose; ``None`` is the experiment's default. ``on_progress`` gets the current activity."""

    lengths: str | None = None
    steps: int | None = None
    seed: int = 0
    seeds: int = 2
    profile: Path | None = None
    out: Path = Path("results")
    on_progress: Callable[[str], None] = lambda what: None
    measured: Path | None = None


def stored(settings: Settings, name: str, find: Callable[[], Any], **asked: Value) -> Any:
    """What ``find`` returns, in JSON, or what an earlier run with the same settings left of it in ``OUT/NAME.json``."""
    path = settings.out / f"{name}.json"
    asked |= {"lengths": settings.lengths, "steps": settings.steps, "seed": settings.seed}
    with suppress(OSError, ValueError, LookupError):  # there is none, or it was cut short, or is of earlier code
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["asked"] == asked:
            return kept["found"]
    found = find()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"asked": asked, "found": found}) + "\n", encoding="utf-8")
    return found


@dataclass(frozen=True)
class Report:
    """``draw`` writes the picture to a path; ``notes`` list assumptions and differences from the paper.

    ``more`` holds further keys of the JSON, for data too long to print.
    """

    title: str
    documents: str
    tables: Sequence[Table]
    draw: Callable[[Path], None]
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "documents": self.documents,
            "tables": [table.to_json() for table in self.tables],
            "findings": [finding._asdict() for finding in self.findings],
            "notes": list(self.notes),
            **self.more,
        }


def grouped_bars(
    path: Path,
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    label: str,
    origin: float = 1.0,
) -> None:
    """Draw a group of bars for each of ``groups``, from ``origin``. Series named as quoted are grey."""
    figure, axis = pyplot_without_display().subplots(figsize=(3 + 1.25 * len(groups), 4.4), constrained_layout=True)
    width = 0.84 / len(series)
    colours = iter(COLOURS)
    for index, (name, values) in enumerate(series.items()):
        shown = [(group, value) for group, value in enumerate(values) if value is not None]
        heights = [value - origin for _, value in shown]
        places = [group + (index - (len(series) - 1) / 2) * width for group, _ in shown]
        colour = QUOTED if name.startswith("quoted") else next(colours)
        bars = axis.bar(places, heights, 0.94 * width, bottom=origin, color=colour, label=name)
        axis.bar_label(bars, [f"{value:.2f}" for _, value in shown], fontsize=7, padding=2)
    axis.axhline(origin, color="black", linewidth=0.8)
    axis.set_xticks(np.arange(len(groups)), groups, fontsize=8)
    axis.set_ylabel(label)
    axis.margins(y=0.12)
    axis.legend(frameon=False, fontsize=8, ncols=min(4, len(series)), loc="upper center", bbox_to_anchor=(0.5, -0.16))
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, fontsize=10)
    save(figure, path)


def bars_of(table: Table, series: Mapping[str, int], *, title: str, label: str) -> Callable[[Path], None]:
    """Draw columns of ``table`` as a group of bars for each row; ``series`` names them by position."""
    groups = [str(row[0]).replace(" (", "\n(").replace(", ", "\n").replace(" = ", "\n= ") for row in table.rows]
    values = {name: column_of(table, place) for name, place in series.items()}
    return partial(grouped_bars, title=title, groups=groups, series=values, label=label)


def column_of(table: Table, place: int) -> list[float | None]:
    """The numbers of a column."""
    return [cast("float | None", row[place]) for row in table.rows]
