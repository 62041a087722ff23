"""What every command shares: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from wlb.terminal import next_command, tell, wrapped

T = TypeVar("T")

_ANY_WIDTH = 1000  # more columns than any table has: a file or a pipe has no right edge

stdout = Console(width=None if sys.stdout.isatty() else _ANY_WIDTH)
stderr = Console(stderr=True)


def show_columns(
    columns: Mapping[str, Sequence[str]],
    *,
    title: str = "",
    notes: Mapping[str, str] | None = None,
    words: Collection[str] | None = None,
    wide_only: Collection[str] = (),
    highlighted: int | None = None,
) -> None:
    """Print a table of ``columns``, by heading; a narrow terminal goes without those of ``wide_only``.

    Columns of ``words``, by default the first, are aligned left and folded where they have to be, the others hold
    numbers. ``notes`` stand below the table, each with the column that it is about. ``highlighted`` is the index of a
    row.
    """
    versions = []
    for left_out in ((), wide_only):
        shown = {heading: cells for heading, cells in columns.items() if heading not in left_out}
        below = "\n".join(note for heading, note in (notes or {}).items() if heading in shown)
        made = empty_table(title, below)
        for heading in shown:
            left = heading in (words or [*columns][:1])
            made.add_column(heading, justify="left" if left else "right", no_wrap=not (left and left_out))
        for index, row in enumerate(zip(*shown.values(), strict=True)):
            made.add_row(*row, style="bold green" if index == highlighted else None)
        versions.append(made)
    print_table(*versions)


def empty_table(title: str = "", caption: str = "") -> Table:
    """An empty table as all are."""
    return Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def print_table(*versions: Table) -> None:
    """Print the first of ``versions``, widest first, that fits the terminal, else the last one.

    No word is ever cut: where the terminal is too narrow for the last version too, its lines are longer. Title and
    caption have the terminal's width, not the table's.
    """
    unbounded = Console(width=_ANY_WIDTH)
    for table in versions:
        if unbounded.measure(table).maximum <= stdout.width:
            break
    for column in table.columns:
        cells = [str(cell) for cell in (column.header, *column.cells)]
        parts = (part for cell in cells for part in (cell.splitlines() if column.no_wrap else cell.split()))
        column.min_width = max(map(len, parts), default=0)
    title, caption, table.title, table.caption = table.title, table.caption, None, None
    _print_prose(title)
    Console(width=max(stdout.width, unbounded.measure(table).minimum)).print(table, crop=False)
    _print_prose(caption)


def _print_prose(text: object) -> None:
    if text:
        lines = wrapped(str(text), stdout.width)
        stdout.print(lines, style="italic", markup=False, highlight=False, soft_wrap=True)


def emit_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(value, allow_nan=False))


def show_next(*words: object) -> None:
    """Print which command follows; nothing where it would have to read standard input again."""
    if words and "-" not in words:
        stdout.print(next_command(*words), markup=False, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Print what is worth knowing, on stderr."""
    tell(f"wlb: note: {text}")


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


def with_progress(tasks: Iterable[tuple[str, T]], total: int) -> Iterator[tuple[str, T, Callable[..., None]]]:
    """Every task with its name and what advances a progress bar of its own, of ``total`` parts."""
    with progress_bar() as bar:
        for name, task in tasks:
            yield name, task, partial(bar.advance, bar.add_task(name, total=total))


@contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that is told how many parts are done, and of how many."""
    with progress_bar() as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
