"""Lines on stderr while a job runs: a progress line that is rewritten on a terminal, plain lines elsewhere.

Training goes on without a console. Lines are lost where the reader of a pipe has ended, a terminal was closed, or the
disk of a log is full; in the last case only until there is room again.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_ERASE_LINE = "\r\x1b[K"
_NOBODY_READS = {errno.EPIPE, errno.EIO}  # the other end of the pipe or terminal is gone


def say(line: str) -> None:
    """One line that stays; it takes the place of the progress line, which comes back with the next step."""
    _write(f"{_ERASE_LINE if _on_terminal() else ''}{line}\n")


def show_progress(line: str) -> None:
    """Show ``line`` in place of the progress line shown before it."""
    if _on_terminal():
        columns = shutil.get_terminal_size().columns  # a line that wraps could not be erased
        _write(f"{_ERASE_LINE}{line[: columns - 1]}")
    else:
        say(line)


def show_meanwhile(line: str) -> None:
    """Show ``line`` in place of the progress line, on a terminal only: a log needs no line that others replace."""
    if _on_terminal():
        show_progress(line)


@contextmanager
def meanwhile(line: str) -> Iterator[None]:
    """``show_meanwhile`` until the block ends."""
    show_meanwhile(line)
    try:
        yield
    finally:
        if _on_terminal():
            _write(_ERASE_LINE)


def end_progress() -> None:
    """Leave the last progress line where it is."""
    if _on_terminal():
        _write("\n")


def flush() -> None:
    """Write out what was printed; a process that leaves with ``os._exit`` has to."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # it was closed before Python started
                stream.flush()
        except OSError:
            _discard(stream)


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _write(text: str) -> None:
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError as error:
        if error.errno in _NOBODY_READS:
            _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Drop what ``stream`` holds and all that follows, or Python tries again at exit and changes the exit status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
