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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
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
    """Print a table of ``columns`` by heading; a narrow terminal omits the columns of ``wide_only``.

    Columns of ``words``, by default the first, are aligned left and folded if needed; the others hold numbers.
    ``notes`` stand below the table and are omitted with their column. ``highlighted`` is the index of a row.
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
    """An empty table in the style of all tables."""
    return Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def print_table(*versions: Table) -> None:
    """Print the first of ``versions`` (widest first) that fits the terminal, else the last one.

    Words are never cut: if even the last version is too wide, its lines exceed the terminal. Title and caption are
    wrapped at the width of the terminal.
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
    """Print the next command to run; nothing if it would have to read standard input again."""
    if words and "-" not in words:
        stdout.print(next_command(*words), markup=False, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Print a note on stderr."""
    tell(f"wlb: note: {text}")


def progress_bar(*counted: ProgressColumn) -> Progress:
    """A progress bar on stderr that disappears when done; silent if stderr is not a terminal.

    ``counted`` are its columns in place of the parts done.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *(counted or [MofNCompleteColumn()]),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )


def with_progress(tasks: Iterable[tuple[str, T]], total: int) -> Iterator[tuple[str, T, Callable[..., None]]]:
    """Yield every task with its name and a function that advances its own progress bar of ``total`` parts."""
    with progress_bar() as bar:
        for name, task in tasks:
            yield name, task, partial(bar.advance, bar.add_task(name, total=total))


@contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar; the yielded function takes the parts done and the total."""
    with progress_bar() as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
