"""The names and files of a token store, on a disk or at a URL of ``fsspec`` such as ``s3://bucket/corpus``.

A store is named by its prefix; a directory, a glob or a list names several shards that form one store.

Files on a disk are mapped into memory. ``RemoteArray`` reads a file at a URL in blocks and keeps the last ones. A store
must not change while it is in use, so that tokens of two versions are never mixed: ``check_unchanged`` compares size
and time of files on a disk, and every request to a URL compares size and version (ETag, checksum or date).
"""

import glob
import mmap
import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from wlb.errors import UserError, require
from wlb.settings import check_path

T = TypeVar("T")

# Size and time of change of .idx, .bin and .mask; None for a file that is missing or at a URL.
Stamps: TypeAlias = tuple[str | None, ...]

_BYTE = np.dtype(np.uint8)
_STAMPED = (".idx", ".bin", ".mask")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+", re.DOTALL)
_TRIES = 6
_FIRST_DELAY = 1.0  # seconds before the second try; doubles with each
_BLOCK = 2 << 20  # bytes per read of a token file: on 1 Gbit/s they take about as long as the request itself
_BLOCKS = 64  # kept per file
# The names under which file systems report the version of a file; all that exist are compared.
_VERSIONS = (
    *("ETag", "etag", "Content-MD5", "content_md5", "md5Hash", "generation", "blob_id"),
    *("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "created"),
)


# A prefix or PREFIX.idx, also at a URL, a directory of stores, a glob of them, or a list of these.
StoreSource: TypeAlias = str | Path | Sequence[str | Path]


def _check_kind(source: object) -> object:
    parts = source if isinstance(source, list | tuple) else [source]
    if not parts or not all(isinstance(part, str | Path) for part in parts):
        raise ValueError("must be the path of a token store, or a list of such paths")
    texts = tuple(str(check_path(part)) for part in parts)
    return texts if isinstance(source, list | tuple) else texts[0]


_StorePath = Annotated[str, Field(json_schema_extra={"format": "path"})]
# A setting that names a store.
StoreSetting = Annotated[
    _StorePath | Annotated[tuple[_StorePath, ...], Field(min_length=1)], BeforeValidator(_check_kind)
]


def store_prefixes(source: StoreSource) -> list[str]:
    """The prefixes of all stores that ``source`` names, sorted by name, in which 10 comes after 9.

    The store of a prefix need not exist, and no server is asked. Raises ``UserError`` for a directory or a glob without
    stores, for a store that is named twice, and for a URL that is a glob or part of a list.
    """
    prefixes = [prefix for part in source_parts(source) for prefix in _expanded(part)]
    if len(prefixes) > 1:
        if remote := [prefix for prefix in prefixes if is_url(prefix)]:
            raise UserError(
                f"{remote[0]} is one of {len(prefixes)} shards, and shards cannot be at URLs; copy them to a disk, or "
                "name each as a store of data.mixture"
            )
        refuse_twice(prefixes)
    return sorted(prefixes, key=_natural)


def names_store(source: StoreSource) -> bool:
    """Whether ``source`` names a store that exists."""
    try:
        indexes = [f"{prefix}.idx" for prefix in store_prefixes(source)]
        return all(RemoteArray(index).size if is_url(index) else os.path.exists(index) for index in indexes)
    except (UserError, FileNotFoundError):
        return False


def source_name(source: StoreSource) -> str:
    """How messages name ``source``."""
    first, *others = source_parts(source)
    return f"{first} and {len(others)} more" if others else first


def refuse_twice(prefixes: Sequence[str]) -> None:
    """Raise ``UserError`` if two of ``prefixes`` are the same store."""
    seen: dict[object, str] = {}
    for prefix in prefixes:
        index = f"{prefix}.idx"
        try:
            found = os.stat(index)
            key: object = (found.st_dev, found.st_ino)  # the same for a hard or symbolic link
        except OSError:
            key = index
        if key in seen:
            raise UserError(f"a token store is named twice, as {seen[key]} and as {prefix}; name it once")
        seen[key] = prefix


def source_parts(source: StoreSource) -> list[str]:
    parts = [str(part) for part in ([source] if isinstance(source, str | Path) else source)]
    if not parts or not all(part.strip() for part in parts):
        raise UserError(f"the path of a token store is empty (got {source!r}); name one")
    return parts


def _expanded(path: str) -> list[str]:
    if is_url(path):
        if set("*?") & set(path):
            raise UserError(f"{path} is a pattern, and stores at URLs cannot be listed; name one store")
        return [path.removesuffix(".idx")]
    path = path.rstrip("/") or "/"
    if os.path.exists(f"{path}.idx"):
        return [path]
    if os.path.isdir(path):
        pattern, missing = os.path.join(glob.escape(path), "*.idx"), f"{path} is a directory; name a token store in it"
        missing += f", or '{Path(path, '**', '*.idx')}' for all below it"
    elif glob.has_magic(path) and not os.path.exists(path):
        pattern = path if path.endswith(".idx") else f"{path}.idx"
        missing = f"no token store matches {path}; make one with wlb prepare"
    else:
        return [path.removesuffix(".idx")]
    if found := glob.glob(pattern, recursive=True):
        return [name.removesuffix(".idx") for name in found]
    raise UserError(missing)


def _natural(name: str) -> tuple[list[str | int], str]:
    parts = re.split("([0-9]+)", name)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)], name


def is_url(name: str | Path) -> bool:
    return _URL.fullmatch(str(name)) is not None


def stamps_of(prefix: str) -> Stamps:
    """The stamps of the store at ``prefix``; take them before opening it."""
    return tuple(_stamp(prefix + ending) for ending in _STAMPED)


def check_unchanged(prefix: str, opened: Stamps) -> None:
    """Raise ``UserError`` if a file of the store at ``prefix`` has changed since it was ``opened``."""
    for ending, before in zip(_STAMPED, opened, strict=False):  # the first may be all that is asked about
        if before is not None and (now := _stamp(prefix + ending)) != before:
            raise _changed(prefix + ending, before, now)


def read_bytes(path: str) -> Any:
    """The whole file: mapped into memory, or read from a URL.

    Raises ``FileNotFoundError`` if there is none, and ``UserError`` if it cannot be read.
    """
    if is_url(path):
        file = RemoteArray(path)
        return file.read(0, file.size)
    try:
        with open(path, "rb") as opened:
            if not os.path.getsize(path):  # an empty file, or a pipe, cannot be mapped
                return opened.read()
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def open_array(path: str, dtype: np.dtype[Any], size: int) -> "NDArray[Any] | RemoteArray | None":
    """A file of ``size`` numbers; None if it does not exist. Raises ``UserError`` if it has more or fewer."""
    expected = size * dtype.itemsize
    try:
        content = RemoteArray(path, dtype) if is_url(path) else read_bytes(path)
    except FileNotFoundError:
        return None
    if (found := content.size if isinstance(content, RemoteArray) else len(content)) != expected:
        raise UserError(
            f"{path} has {found} bytes, but its index asks for {expected}: it is truncated or belongs to another "
            "store; make the store again"
        )
    return content if isinstance(content, RemoteArray) else np.frombuffer(content, dtype)


class RemoteArray:
    """The file at ``url`` in its present version, ``size`` bytes, as a one-dimensional array that can be sliced.

    Threads may share it. Raises ``FileNotFoundError`` if there is no file, and ``UserError`` if the server fails.
    """

    def __init__(self, url: str, dtype: np.dtype[Any] = _BYTE) -> None:
        self.url, self._dtype = url, dtype
        self.size, self._version = self._tried(self._found)
        self._cache = require("fsspec.caching", "remote").BlockCache(_BLOCK, self.read, self.size, _BLOCKS)

    def __getitem__(self, places: slice) -> NDArray[Any]:
        """A read-only copy. Raises ``UserError`` if it cannot be read, or if the file has changed."""
        size = self._dtype.itemsize
        start, stop, _ = places.indices(self.size // size)
        return np.frombuffer(self._cache._fetch(start * size, stop * size), self._dtype)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes from ``start`` to ``stop``, or to the end. Raises ``UserError`` if the file has changed."""
        stop = min(stop, self.size)
        try:
            content, (_, now) = self._tried(lambda: self._range(start, stop)), self._tried(self._found)
        except FileNotFoundError:
            content, now = b"", None
        if now != self._version:
            raise _changed(self.url, self._version, now)
        return content

    def _range(self, start: int, stop: int) -> bytes:
        files, path = _file_system(self.url)
        content: bytes
        if self.url.startswith("http"):  # cat_file reads the whole file if the server ignores the range
            with files.open(path, "rb", max(1, stop - start), size=self.size, cache_type="none") as file:
                file.seek(start)
                content = file.read(stop - start)
        else:
            content = files.cat_file(path, start=start, end=stop)
        if len(content) != stop - start:
            raise OSError(f"got {len(content)} bytes from byte {start} on, but asked for {stop - start}")
        return content

    def _found(self) -> tuple[int, str]:
        files, path = _file_system(self.url)
        found = files.info(path)
        if found.get("type") == "directory":
            raise FileNotFoundError(self.url)
        marks = [f"{name} {found[name]}" for name in _VERSIONS if found.get(name) is not None]
        if found.get("size") is None or not marks:
            raise UserError(
                f"{self.url}: the server gives no size, or neither ETag nor checksum nor date, so a change would go "
                "unnoticed; serve the store from another server, or copy it to a disk"
            )
        return int(found["size"]), ", ".join([f"{found['size']} bytes", *marks])

    def _tried(self, ask: Callable[[], T]) -> T:
        """The answer to ``ask``, which is repeated if it fails. Raises ``FileNotFoundError`` if that is the answer."""
        for attempt in range(_TRIES):
            try:
                return ask()
            except UserError:
                raise
            except Exception as error:  # every file system has its own kinds
                # Over HTTP, fsspec raises FileNotFoundError whatever goes wrong.
                cause = (self.url.startswith("http") and error.__cause__) or error
                status = getattr(cause, "status", None)
                if status in (404, 410) or isinstance(cause, FileNotFoundError):
                    raise FileNotFoundError(self.url) from error
                is_final = isinstance(error, PermissionError | ValueError) or status in (401, 403)
                tries = "" if is_final else f" in {_TRIES} tries"
                if is_final or attempt == _TRIES - 1:
                    what = " ".join(f"{type(cause).__name__}: {cause}".split())
                    raise UserError(
                        f"{self.url} cannot be read{tries}: {what}; check the URL, the network and "
                        "the credentials in the environment, then start again"
                    ) from error
                time.sleep(_FIRST_DELAY * 2**attempt)
        raise AssertionError


def _file_system(url: str) -> tuple[Any, str]:
    """The file system, which fsspec caches per process, and the path in it."""
    core = require("fsspec.core", "remote")
    try:
        files, path = core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{url} cannot be opened: {reason}; for s3 and http run: pip install 'wlb-llm[remote]'"
        ) from error
    return files, path


def _stamp(path: str) -> str | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    seconds, nanoseconds = divmod(found.st_mtime_ns, 10**9)
    return f"{found.st_size} bytes of {datetime.fromtimestamp(seconds)}.{nanoseconds:09}"


def _changed(path: str, before: str, now: str | None) -> UserError:
    return UserError(
        f"{path} changed while it was in use: it had {before}, now {f'it has {now}' if now else 'it is gone'}; put "
        "back what was there, or start anew on the new store"
    )
