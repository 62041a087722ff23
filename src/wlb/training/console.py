"""Lines on stderr while a job runs, and on a terminal what it is doing before its first step.

Training goes on without a console. Lines are lost where the reader of a pipe has ended, a terminal was closed, or the
disk of a log is full; in the last case only until there is room again.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from wlb.terminal import columns, wrapped

_ERASE_LINE = "\r\x1b[K"
_NOBODY_READS = {errno.EPIPE, errno.EIO}  # the other end of the pipe or terminal is gone


def say(line: str) -> None:
    """Lines that stay; they take the place of what ``show_meanwhile`` shows."""
    _write(f"{_ERASE_LINE if _on_terminal() else ''}{wrapped(line)}\n")


def show_meanwhile(line: str) -> None:
    """Show a short ``line`` until the next one, on a terminal only: a log needs no line that others replace."""
    if _on_terminal():
        _write(f"{_ERASE_LINE}{line}")


@contextmanager
def meanwhile(line: str) -> Iterator[None]:
    """``show_meanwhile`` until the block ends."""
    show_meanwhile(line)
    try:
        yield
    finally:
        if _on_terminal():
            _write(_ERASE_LINE)


def flush() -> None:
    """Write out what was printed; a process that leaves with ``os._exit`` has to."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # it was closed before Python started
                stream.flush()
        except OSError:
            _discard(stream)


def _on_terminal() -> bool:
    return columns() is not None


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
