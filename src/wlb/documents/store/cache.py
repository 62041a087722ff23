"""A cache on this machine, shared by its processes: files in one directory, of which the least recently used go first.

One process makes a file while the others that need it wait. It appears whole, under a name that says what it is a copy
of, and is never changed.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from wlb.errors import UserError
from wlb.files import flush, open_locked

_POLL = 0.02  # seconds
_GIB = 64.0


def cached_file(name: str, size: int, pieces: Callable[[], Iterable[bytes]]) -> Path:
    """The file ``name`` of ``size`` bytes, made of ``pieces`` if it is not there.

    Raises ``UserError`` where the cache cannot be written or is too small.
    """
    target = cache_folder() / name
    with _errors():
        if not _used(target, size):
            with _alone(target):
                if not _used(target, size):
                    _put(target, size, pieces())
    return target


def cached_bytes(name: str, size: int, start: int, stop: int, fetch: Callable[[], bytes]) -> bytes:
    """Bytes of the file ``name`` of ``size`` bytes, which is what ``fetch`` returns if it is not there.

    Raises ``UserError`` where the cache cannot be written or is too small.
    """
    target = cache_folder() / name
    with _errors():
        if (found := _bytes_of(target, size, start, stop)) is not None:
            return found
        with _alone(target):
            if (found := _bytes_of(target, size, start, stop)) is not None:
                return found
            content = fetch()
            _put(target, size, [content])
    return content[start:stop]


def cache_folder() -> Path:
    """``WLB_CACHE_DIR``, or ``wlb`` in the user's directory of caches."""
    if named := os.environ.get("WLB_CACHE_DIR"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "wlb"


def _bound(folder: Path) -> int:
    """Bytes that the cache may have: 64 GiB, or a quarter of a disk that is smaller than 256."""
    named = os.environ.get("WLB_CACHE_GIB")
    try:
        gib = _GIB if named is None else float(named)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise UserError(f"WLB_CACHE_GIB = {named!r} is no size of a cache; give it a positive number of GiB")
    bound = int(gib * 2**30)
    return bound if named else min(bound, shutil.disk_usage(folder).total // 4)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(
            f"the cache of remote stores {cache_folder()} cannot be used: {error.strerror}; make room, or name "
            "another directory in WLB_CACHE_DIR"
        ) from error


def _used(path: Path, size: int) -> bool:
    """Whether a file is there and whole; if so it has been used just now."""
    try:
        if path.stat().st_size != size:
            return False
        os.utime(path)
    except FileNotFoundError:  # not there, or removed between the two
        return False
    return True


def _bytes_of(path: Path, size: int, start: int, stop: int) -> bytes | None:
    """Bytes of a cached block, unless it is not there, or not whole after a power cut."""
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != size:
                return None
            os.utime(file.fileno())
            found = os.pread(file.fileno(), stop - start, start)
    except FileNotFoundError:
        return None
    return found if len(found) == stop - start else None


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Only one process, and one thread, of those that are to make ``target`` is inside; a killed one is no longer."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f"{target.name}.lock")
    while (descriptor := open_locked(lock)) is None:
        time.sleep(_POLL)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _put(target: Path, size: int, pieces: Iterable[bytes]) -> None:
    _make_room(target.parent, size)
    part = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with part.open("wb") as file:
            file.writelines(pieces)
            flush(file)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


class _Written:
    """Bytes that this process has written since it last looked how large the cache is; infinite before the first."""

    bytes = float("inf")


def _make_room(folder: Path, size: int) -> None:
    """Remove files until ``size`` bytes fit.

    An eighth of the bound is left free, and a process looks again only when it has written an eighth of that: so the
    bound holds for up to eight processes, which do not list the directory for every block.
    """
    bound = _bound(folder)
    _Written.bytes += size
    if _Written.bytes <= bound // 64:
        return
    files = []
    for entry in os.scandir(folder):
        try:
            status = entry.stat()
        except FileNotFoundError:  # removed by another process
            continue
        if not entry.name.endswith(".lock"):
            files.append((status.st_mtime_ns, status.st_size, entry.path))
    allowed = bound - bound // 8 - size
    if allowed < 0:
        raise UserError(
            f"{size / 2**30:.1f} GiB do not fit into seven eighths of the cache {folder}, which may have "
            f"{bound / 2**30:.1f} GiB; raise WLB_CACHE_GIB"
        )
    held = sum(size for _, size, _ in files)
    for _, file_size, path in sorted(files):
        if held <= allowed:
            break
        Path(path).unlink(missing_ok=True)
        held -= file_size
    _Written.bytes = size
