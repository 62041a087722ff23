"""Lines on stderr while a job runs, and its summary on stdout.

Training goes on without a console: lines are lost if a pipe or terminal was closed, or the disk of a log is full.
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
    """Flush stdout and stderr, which a process that leaves with ``os._exit`` has to do itself."""
    write(sys.stdout, "")
    write(sys.stderr, "")


def write(stream: TextIO | None, text: str) -> None:
    """Write ``text``; raises ``OSError`` if there is no room for stdout, because its lines are results."""
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
