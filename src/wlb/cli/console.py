"""What every command shares: results on stdout, everything else on stderr."""

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from wlb.terminal import next_command, tell, wrapped

_ANY_WIDTH = 1000  # more columns than any table has: a file or a pipe has no right edge

stdout = Console(width=None if sys.stdout.isatty() else _ANY_WIDTH, markup=False, highlight=False)
stderr = Console(stderr=True)


def show_columns(
    columns: Mapping[str, Sequence[str]],
    *,
    title: str = "",
    notes: Mapping[str, str] | None = None,
    words: Collection[str] | None = None,
) -> None:
    """Print a table of ``columns`` by heading, and below it the ``notes`` of its columns.

    Columns of ``words``, by default the first, are aligned left and folded if needed; the others hold numbers.
    """
    made = empty_table()
    for heading in columns:
        left = heading in (words or [*columns][:1])
        made.add_column(heading, justify="left" if left else "right", no_wrap=not left)
    for row in zip(*columns.values(), strict=True):
        made.add_row(*row)
    _print_prose(title)
    print_table(made)
    _print_prose("\n".join(note for heading, note in (notes or {}).items() if heading in columns))


def empty_table() -> Table:
    """An empty table in the style of all tables."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def print_table(table: Table) -> None:
    """Print ``table`` without cutting words: lines of a table that is too wide exceed the terminal."""
    for column in table.columns:
        cells = [str(cell) for cell in (column.header, *column.cells)]
        parts = (part for cell in cells for part in (cell.splitlines() if column.no_wrap else cell.split()))
        column.min_width = max(map(len, parts), default=0)
    least = Console(width=_ANY_WIDTH).measure(table).minimum
    Console(width=max(stdout.width, least)).print(table, crop=False)


def _print_prose(text: str) -> None:
    if text:
        stdout.print(wrapped(text, stdout.width), style="italic", soft_wrap=True)


def emit_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(value, allow_nan=False))


def show_next(*words: object) -> None:
    """Print the next command to run; nothing if it would have to read standard input again."""
    if words and "-" not in words:
        stdout.print(next_command(*words), soft_wrap=True)


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


@contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar; the yielded function takes the parts done and the total."""
    with progress_bar() as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
