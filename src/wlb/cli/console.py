"""What every command shares: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

_ANY_WIDTH = 1000  # more columns than any table has: a file or a pipe has no right edge

stdout = Console(width=None if sys.stdout.isatty() else _ANY_WIDTH)
stderr = Console(stderr=True)


def print_table(*versions: Table) -> None:
    """Print the first of ``versions``, widest first, that fits the terminal, else the last one.

    No word is ever cut: where the terminal is too narrow for the last version too, its lines are longer.
    """
    unbounded = Console(width=_ANY_WIDTH)
    for table in versions:
        if unbounded.measure(table).maximum <= stdout.width:
            break
    for column in table.columns:
        cells = [str(cell) for cell in (column.header, *column.cells)]
        parts = (part for cell in cells for part in (cell.splitlines() if column.no_wrap else cell.split()))
        column.min_width = max(map(len, parts), default=0)
    Console(width=max(stdout.width, unbounded.measure(table).minimum)).print(table, crop=False)


def emit_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(value, allow_nan=False))


def progress_bar() -> Progress:
    """A progress bar on stderr that disappears when done and stays silent where stderr is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )
