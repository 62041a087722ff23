"""Atomic, locked file writes: a crash leaves the old or the new file, and two processes never mix their content.

``replace_text`` writes a file under another name, flushes it to the disk and then renames it. For several files that
belong together, call the steps yourself: ``write_synced`` or ``flush``, then ``move`` or ``sync``.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import IO, Any

# What file systems without locks answer, such as Lustre mounted without them.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``; readers see the old or the new content, even after a power cut."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write_synced(part, text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_synced(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` and wait until it is on the disk; a crash may leave a part of it."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        flush(file)


def flush(file: IO[Any]) -> None:
    """Wait until everything written to ``file`` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def move(part: Path, target: Path) -> None:
    """Rename a complete file or directory, and wait until the new name is on the disk."""
    os.replace(part, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a directory, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_locked(path: Path) -> int | None:
    """Open ``path``, creating it if needed, and lock it against other processes until the descriptor is closed.

    Returns None if another process has the lock. On file systems without locks it always succeeds.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            return None
    return descriptor
