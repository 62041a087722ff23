"""What is asked of the operating system: the cores this process may use, and locks between processes."""

from __future__ import annotations

import errno
import os
import sys

# What file systems without locks answer, such as Lustre mounted without them.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


def usable_cores() -> int:
    """CPU cores this process may run on: job schedulers bind processes to some of them; not every system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def try_lock(descriptor: int) -> bool:
    """Lock an open file against other processes until it is closed, at the latest when this process ends.

    Returns whether this process has it now. Where there are no such locks (Windows, some network file systems) the
    answer is yes.
    """
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
