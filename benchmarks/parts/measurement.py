"""What every benchmark here shares: its command line, timing of alternatives in turn, tables, and JSON that says where.

Other programs lengthen the CPU seconds of what runs beside them, by up to 90% for one micro-batch. So training is
measured at least twice: ``lower_median`` is the figure, ``spread`` and ``differences`` say how far measurements are
apart, and ``load`` how busy the machine was.

Plans are computed by one thread, so they are timed by the CPU time of the process: other work on the machine then costs
the caches it displaces, not the time it runs. The garbage collector stays on, as it is in training, but does not walk
what imports left behind: the peers' packages bring hundreds of thousands of objects, and going over them would be
charged to whichever method happens to set off a full collection. Alternatives take turns, so that a change of the
machine's speed meets all of them, and the median over turns is reported.
"""

import argparse
import functools
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.console import Console
from rich.table import Table

from wlb.errors import UserError

T = TypeVar("T")
R = TypeVar("R")
Row = Mapping[str, Any]

console = Console(width=160, highlight=False)
_LOAD_AT_START = round(os.getloadavg()[0], 2)


def make_parser(description: str | None, out: str | None = None) -> argparse.ArgumentParser:
    """A parser that has ``--out``, where results go as JSON; by default ``out``, or nowhere."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help="write the results as JSON")
    return parser


def command(main: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """``main`` as a command that returns its exit status: 2 and one line for a ``UserError``."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments) or 0
        except UserError as error:
            name = Path(main.__code__.co_filename).stem.replace("_", " ")
            print(f"{name} benchmark: error: {error}", file=sys.stderr)
            return 2

    return run


def chosen(names: str, known: Sequence[str], what: str) -> list[str]:
    """``names``, written with commas. Raises ``UserError`` for one that is not ``known``."""
    wanted = names.split(",")
    if unknown := [name for name in wanted if name not in known]:
        raise UserError(f"unknown {what} {unknown[0]!r}; choose from {', '.join(known)}")
    return wanted


class CpuTimer:
    """CPU seconds of the whole process, threads included, of each of the calls made through it."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def __call__(self, function: Callable[..., R], *arguments: Any) -> R:
        began = time.process_time()
        result = function(*arguments)
        self.calls.append(time.process_time() - began)
        return result

    @property
    def seconds(self) -> float:
        return sum(self.calls)


def freeze_imports() -> None:
    """Take everything that exists now out of garbage collection; call it once, after the imports."""
    gc.collect()
    gc.freeze()


def in_turns(alternatives: Mapping[str, Callable[[], T]], turns: int) -> dict[str, list[T]]:
    """What each alternative returns in each of ``turns`` turns, all of them called once in every turn."""
    results: dict[str, list[T]] = {name: [] for name in alternatives}
    for _ in range(turns):
        for name, measure in alternatives.items():
            gc.collect()  # what one alternative leaves behind is not charged to the next
            results[name].append(measure())
    return results


def lower_median(repeated: ArrayLike) -> NDArray[np.float64]:
    """The median of what was measured several times, shape (repetitions, ...); of two the smaller."""
    ordered: NDArray[np.float64] = np.sort(np.asarray(repeated, np.float64), axis=0)
    middle: NDArray[np.float64] = ordered[(len(ordered) - 1) // 2]
    return middle


def spread(speeds: Sequence[float]) -> dict[str, float]:
    """The lowest and highest of the speeds that repetitions gave, and of the figure made of them."""
    return {"least": float(min(speeds)), "most": float(max(speeds))}


def differences(repeated: ArrayLike) -> dict[str, float]:
    """How far measurements of the same are apart: the longest over the shortest, less one.

    ``repeated`` are measured seconds, shape (repetitions, measurements).
    """
    apart = np.max(repeated, axis=0) / np.min(repeated, axis=0) - 1
    return {"median_difference": float(np.median(apart)), "worst_difference": float(apart.max())}


def load() -> dict[str, float]:
    """The load average (of a minute) when this program started and now; both count the program itself."""
    return {"load_at_start": _LOAD_AT_START, "load_at_end": round(os.getloadavg()[0], 2)}


def facts(*distributions: str) -> dict[str, Any]:
    """The machine and its load, and versions of installed ``distributions``; nothing that names the machine."""
    here = {
        "cpu": _cpu_model(),
        "cores": str(os.cpu_count() or 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }
    return {"machine": here | load(), "versions": versions("wlb-llm", "numpy", *distributions)}


def versions(*distributions: str) -> dict[str, str]:
    """The installed ones of ``distributions``, with their versions."""
    found = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write(results: Mapping[str, Any], out: Path | None, indent: int | None = 1) -> None:
    """Write ``results`` to ``out`` as JSON, if anywhere."""
    if out is not None:
        out = Path(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=indent) + "\n", encoding="utf-8")


def show(title: str, rows: Sequence[Row], columns: Mapping[str, str] | None = None, caption: str | None = None) -> None:
    """Print ``rows`` as a table.

    ``columns`` has a format by heading, such as ``"{seconds:.3f}"``; a cell is empty where what it formats is None.
    Without it the table has whatever the rows have, but for lists.
    """
    if not rows:
        return
    texts = [_formatted(row, columns) if columns else dict(_cells(row)) for row in rows]
    table = Table(title=title, title_justify="left", caption=caption, pad_edge=False)
    for place, heading in enumerate(texts[0]):
        table.add_column(heading.replace("_", " "), justify="right" if place else "left", no_wrap=not place)
    for cells in texts:
        table.add_row(*cells.values())
    console.print(table)


def _formatted(row: Row, columns: Mapping[str, str]) -> dict[str, str]:
    formatter, cells = Formatter(), {}
    for heading, form in columns.items():
        fields = [formatter.get_field(name, (), row)[0] for _, name, _, _ in formatter.parse(form) if name]
        cells[heading] = "" if None in fields else form.format_map(row)
    return cells


def _cells(row: Row) -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _cells({f"{name}, {inner}": one for inner, one in value.items()})
        elif not isinstance(value, list):
            yield name, f"{value:,.4g}" if isinstance(value, float) else "" if value is None else str(value)
