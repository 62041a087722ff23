"""Lines on stderr while a job runs: a progress line that is rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys

_ERASE_LINE = "\r\x1b[K"


def say(line: str) -> None:
    """One line that stays; it takes the place of the progress line, which comes back with the next step."""
    print(f"{_ERASE_LINE if sys.stderr.isatty() else ''}{line}", file=sys.stderr, flush=True)


def show_progress(line: str) -> None:
    """Show ``line`` in place of the progress line shown before it."""
    if sys.stderr.isatty():
        print(f"{_ERASE_LINE}{line}", end="", file=sys.stderr, flush=True)
    else:
        say(line)


def end_progress() -> None:
    """Leave the last progress line where it is."""
    if sys.stderr.isatty():
        print(file=sys.stderr)
