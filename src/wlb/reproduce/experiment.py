"""What every experiment takes and gives: ``Settings`` in, a ``Report`` of tables, findings and one picture out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["", "quoted", "simulated", "measured"]
Value = str | float | None


class Column(NamedTuple):
    """``kind`` says where the numbers are from; columns that name things have none."""

    name: str
    kind: Kind = ""
    format: str = ".3f"


class Table(NamedTuple):
    title: str
    columns: tuple[Column, ...]
    rows: list[tuple[Value, ...]]

    def to_json(self) -> dict[str, Any]:
        columns = [{"name": column.name, "kind": column.kind or None} for column in self.columns]
        return {"title": self.title, "columns": columns, "rows": [list(row) for row in self.rows]}


class Finding(NamedTuple):
    """Something that the paper states, whether it holds here (None: unknown), and the numbers that say so."""

    statement: str
    holds: bool | None
    evidence: str


@dataclass(frozen=True)
class Settings:
    """What a user may choose; ``None`` is the experiment's default. ``on_progress`` gets what is being done."""

    lengths: str | None = None
    steps: int | None = None
    seed: int = 0
    seeds: int = 2
    profile: Path | None = None
    out: Path = Path("results")
    on_progress: Callable[[str], None] = lambda what: None


@dataclass(frozen=True)
class Report:
    """``draw`` writes the picture to a path; ``notes`` say what is assumed and what differs from the paper."""

    title: str
    documents: str
    tables: Sequence[Table]
    draw: Callable[[Path], None]
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "documents": self.documents,
            "tables": [table.to_json() for table in self.tables],
            "findings": [finding._asdict() for finding in self.findings],
            "notes": list(self.notes),
        }
