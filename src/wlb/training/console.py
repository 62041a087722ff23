"""Lines on stderr while a job runs, and its summary on stdout.

Training goes on without a console. Lines are lost where the reader of a pipe has ended, a terminal was closed, or the
disk of a log is full; in the last case only until there is room again.
"""

import errno
import os
import sys
from typing import TextIO

from wlb.terminal import wrapped

_NOBODY_READS = {errno.EPIPE, errno.EIO}  # the other end of the pipe or terminal is gone


def say(line: str) -> None:
    """Print ``line`` on stderr, unless it is empty."""
    write(sys.stderr, f"{wrapped(line)}\n" if line else "")


def flush() -> None:
    """Write out what was printed; a process that leaves with ``os._exit`` has to."""
    write(sys.stdout, "")
    write(sys.stderr, "")


def write(stream: TextIO | None, text: str) -> None:
    """Write ``text``; raises ``OSError`` where there is no room on stdout, as what is written there is a result."""
    try:
        if stream is not None:  # it was open when Python started
            stream.write(text)
            stream.flush()
    except OSError as error:
        if stream and error.errno in _NOBODY_READS:  # drop all that follows, or Python tries again at exit, and fails
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        elif stream is sys.stdout:
            raise
