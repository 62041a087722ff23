"""Text for people: counted things, and lines on stderr, wrapped between words if it is a terminal."""

import errno
import os
import shlex
import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

_USUAL_COLUMNS = 80
_LONGEST_LIST = 80  # characters
_NOBODY_READS = {errno.EPIPE, errno.EIO}  # the other end of the pipe or terminal is gone


def number_of(number: int, thing: str) -> str:
    """``number`` and ``thing``, in the plural unless it is one: "1 document", "2,000 documents"."""
    plural = "es" if thing.endswith(("s", "h")) else "s"
    return f"{number:,} {thing}{'' if number == 1 else plural}"


def beginning_of(names: Iterable[str]) -> str:
    """``names`` in one line, cut after 80 characters."""
    return " ".join(", ".join(names).split())[:_LONGEST_LIST]


def next_command(*words: object) -> str:
    """The line that names the next ``wlb`` command; it can be run as printed."""
    return f"next: {shlex.join(['wlb', *map(str, words)])}"


def columns() -> int | None:
    """The width of the terminal on stderr; None if stderr is not a terminal, so lines may have any length."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL_COLUMNS
    except OSError:
        return _USUAL_COLUMNS


def wrapped(text: str, width: int | None = None) -> str:
    """``text`` wrapped at ``width`` (default: of stderr); continuation lines are indented by two more columns."""
    if (width := width or columns()) is None:
        return text
    filler = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.split("\n"):
        filler.subsequent_indent = line[: len(line) - len(line.lstrip())] + "  "
        lines.append(filler.fill(line))
    return "\n".join(lines)


def tell(text: str) -> None:
    """Print ``text`` on stderr, unless it is empty."""
    write(sys.stderr, f"{wrapped(text)}\n" if text else "")


def write(stream: TextIO | None, text: str) -> None:
    """Write ``text``, also without a console: it is lost if the pipe or terminal was closed, or a log's disk is full.

    Raises ``OSError`` if there is no room for stdout, because its lines are results.
    """
    try:
        if stream is not None:  # None if it was closed when Python started
            stream.write(text)
            stream.flush()
    except OSError as error:
        if stream and error.errno in _NOBODY_READS:  # drop all that follows, or Python tries again at exit and fails
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        elif stream is sys.stdout:
            raise
