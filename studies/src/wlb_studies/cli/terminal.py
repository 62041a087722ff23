"""What the comparisons of several methods share on a terminal: progress of each, and tables of many columns."""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import TypeVar

from wlb.cli import console

T = TypeVar("T")
_WIDE = 100  # columns of a terminal that has room for all columns of a table


def with_progress(tasks: Iterable[tuple[str, T]], total: int) -> Iterator[tuple[str, T, Callable[..., None]]]:
    """Yield every task with its name and a function that advances its own progress bar of ``total`` parts."""
    with console.progress_bar() as bar:
        for name, task in tasks:
            yield name, task, partial(bar.advance, bar.add_task(name, total=total))


def with_room(columns: dict[str, list[str]], wide_only: Collection[str]) -> dict[str, list[str]]:
    """``columns`` of a table by heading; without those of ``wide_only`` on a narrow terminal."""
    return {name: column for name, column in columns.items() if console.stdout.width >= _WIDE or name not in wide_only}
