"""What every command shares: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PIPE_WIDTH = 128  # columns of a table that goes into a file or a pipe

stdout = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
stderr = Console(stderr=True)


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
