"""Stores on object storage and web servers: prefixes that are URLs of ``fsspec``, such as ``s3://bucket/corpus``.

A ``RemotePath`` is such a URL as a ``Path``, so a store opens by the same steps wherever it lies. Files that are
mapped or parsed (``.idx``, ``.json``) are brought whole into a cache on this machine. Of token files and
masks, ``RemoteArray`` reads blocks, which go through the same cache. The processes of a machine share it: one of them
fetches a file or block, and the others wait for it.

The size and version (ETag, checksum or date) of a file are noted when it is first looked at, and compared after every
read, so tokens of two versions are never mixed. A read that fails, is cut short or takes too long is repeated a few
times; after that it is a ``UserError``.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PosixPath
from queue import Empty, SimpleQueue
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store.cache import cached_bytes, cached_file
from wlb.errors import UserError, require

_T = TypeVar("_T")

_TRIES = 6
_FIRST_DELAY = 1.0  # seconds before the second try; doubles with each
_TIMEOUT = 60.0  # seconds for one request
_BLOCK = 2 << 20  # bytes read of a token file: no more takes the time that a request takes anyway, on 1 Gbit/s
_PIECE = 32 << 20  # bytes of a file that is read whole
# What file systems call the version of a file; all that are there are compared.
_VERSIONS = (
    *("ETag", "etag", "Content-MD5", "content_md5", "md5Hash", "generation", "blob_id"),
    *("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "created"),
)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+[^/].*", re.DOTALL)


@dataclass(frozen=True)
class _Version:
    """What a file system says of a file: its size in bytes, and a text that changes with its content."""

    size: int
    mark: str

    def __str__(self) -> str:
        return f"{self.size} bytes, {self.mark}"


class RemotePath(PosixPath):
    """A URL as a path: ``exists``, ``is_file``, ``stat`` (of which the size is set), ``open`` and ``read_bytes`` work.

    All raise ``UserError`` where the server or the cache fail; ``open`` brings the whole file into the cache.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def exists(self, **_: Any) -> bool:
        return self._version is not None

    def stat(self, **_: Any) -> os.stat_result:
        return os.stat_result((stat.S_IFREG, 0, 0, 0, 0, 0, self._found.size, 0, 0, 0))

    def open(self, mode: str = "rb", buffering: int = -1, *_: Any, **__: Any) -> IO[Any]:  # type: ignore[override]
        if mode != "rb":
            raise UserError(f"{self} cannot be written; write to a path and copy the files")
        return self.local().open("rb", buffering)

    def local(self) -> Path:
        """The whole file in the cache of this machine. Raises ``FileNotFoundError`` where the server has none."""
        return cached_file(f"{self._key}-{self.name}", self._found.size, self.pieces)

    def pieces(self) -> Iterator[bytes]:
        """The file in order, not through the cache. Raises ``UserError`` if it is no longer what it was."""
        size = self._found.size
        for start in range(0, size, _PIECE):
            yield self._read_range(start, min(start + _PIECE, size))

    def read(self, start: int, stop: int) -> bytes:
        """Bytes from ``start`` to ``stop``, in blocks through the cache."""
        parts = []
        for number in range(start // _BLOCK, -(-stop // _BLOCK)):
            first = number * _BLOCK
            parts.append(self._read_block(number, max(start - first, 0), min(stop - first, _BLOCK)))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_block(self, number: int, start: int, stop: int) -> bytes:
        first = number * _BLOCK
        size = min(_BLOCK, self._found.size - first)

        def fetch() -> bytes:
            return self._read_range(first, first + size)

        return cached_bytes(f"{self._key}-{number}", size, start, stop, fetch)

    def _read_range(self, start: int, stop: int) -> bytes:
        """These bytes from the server, of the version that was found at first."""

        def read(files: Any, path: str) -> bytes:
            found: bytes
            if self._is_web:
                found = self._read_web_range(files, path, start, stop)
            else:
                found = files.cat_file(path, start=start, end=stop)
            if len(found) != stop - start:
                raise OSError(f"got {len(found)} bytes from byte {start} on, asked for {stop - start}")
            return found

        try:
            content, now = self._tried(read), self._tried(_version_of)
        except FileNotFoundError:
            content, now = b"", None
        if now != self._found:
            is_now = "it is gone" if now is None else f"it has {now}"
            raise UserError(
                f"{self} changed while it was in use: it had {self._found}, now {is_now}; put back what was there, or "
                "start anew on the new store"
            )
        return content

    def _read_web_range(self, files: Any, path: str, start: int, stop: int) -> bytes:
        """As ``cat_file``, which takes in all of the file where a server sends that, whatever part it is asked for."""
        try:
            with files.open(path, "rb", stop - start, size=self._found.size, cache_type="none") as file:
                file.seek(start)
                return bytes(file.read(stop - start))
        except ValueError as error:
            if "range requests" not in str(error):
                raise
            raise UserError(
                f"{self} cannot be read in parts: the server ignores the header Range; serve the store from one that "
                "does not, such as nginx, or copy it to a disk"
            ) from error

    @cached_property
    def _version(self) -> _Version | None:
        """As it was at the first look; None where there is no such file."""
        try:
            version = self._tried(_version_of)
        except FileNotFoundError:
            return None
        if version is not None and not version.mark:
            raise UserError(
                f"{self}: the server gives neither ETag nor checksum nor date, so a change would go unnoticed; "
                "serve the store from another server, or copy it to a disk"
            )
        return version

    @property
    def _found(self) -> _Version:
        if self._version is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return self._version

    @property
    def _key(self) -> str:
        """Names this version of the file in the cache."""
        return hashlib.sha256(f"{self}\n{self._found}".encode()).hexdigest()[:32]

    def _tried(self, ask: Callable[[Any, str], _T]) -> _T:
        """The answer to ``ask``, several times if need be. Raises ``FileNotFoundError`` where that is the answer."""
        files, path = self._opened()
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_FIRST_DELAY * 2 ** (attempt - 1))
            try:
                return _within(_TIMEOUT, lambda: ask(files, path))
            except UserError:
                raise
            except Exception as error:  # of whatever kind the file system has
                if self._is_missing(error):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from error
                if isinstance(error, PermissionError) or _web_status(error) in (401, 403):
                    raise self._failed(error, attempt + 1) from error
                failure = error
        raise self._failed(failure, _TRIES) from failure

    @property
    def _is_web(self) -> bool:
        return str(self).startswith("http")

    def _is_missing(self, error: Exception) -> bool:
        """Whether the server said so: for HTTP, fsspec says FileNotFoundError too where no answer came."""
        if self._is_web and (error.__cause__ or not isinstance(error, FileNotFoundError)):
            return _web_status(error) in (404, 410)
        return isinstance(error, FileNotFoundError)

    def _failed(self, error: BaseException, tries: int) -> UserError:
        cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
        what = " ".join(f"{type(cause).__name__}: {cause}".split())
        times = f" in {tries} tries" * (tries > 1)
        return UserError(
            f"{self} cannot be read{times}: {what}; check the URL, the network and the credentials in the environment, "
            "then start again"
        )

    def _opened(self) -> tuple[Any, str]:
        """The file system and the path in it, opened anew in a process that was forked."""
        opened = self.__dict__.get("_files")
        if opened is None or opened[0] != os.getpid():
            core = require("fsspec.core", "remote")
            try:
                files, path = core.url_to_fs(str(self), use_listings_cache=False)
            except ImportError as error:
                reason = " ".join(str(error).split())
                raise UserError(
                    f"{self} cannot be opened: {reason}; for s3 and http run: pip install 'wlb-llm[remote]'"
                ) from error
            except Exception as error:  # such as an unknown protocol, or an endpoint that is none
                raise self._failed(error, 1) from error
            opened = self.__dict__["_files"] = os.getpid(), files, path
        return opened[1], opened[2]


class RemoteArray:
    """A remote file as a one-dimensional array of which slices are read; safe to share between threads."""

    def __init__(self, path: RemotePath, dtype: np.dtype[Any]) -> None:
        self._path = path
        self._dtype = dtype
        self.nbytes = path.stat().st_size

    def __getitem__(self, places: slice) -> NDArray[Any]:
        """A read-only copy. Raises ``UserError`` where it cannot be read, or the file has changed."""
        size = self._dtype.itemsize
        start, stop, _ = places.indices(self.nbytes // size)
        if start >= stop:
            return np.empty(0, self._dtype)
        return np.frombuffer(self._path.read(start * size, stop * size), self._dtype)


def store_prefix(prefix: str | Path) -> Path:
    """The path of a store; a ``RemotePath`` for a URL, also one that went through ``Path``, which drops a slash.

    Raises ``UserError`` for an empty prefix, a URL that a path cannot hold, such as one with empty names, and that of a
    local file.
    """
    if not str(prefix).strip():
        raise UserError(f"the path of a token store is empty (got {prefix!r}); name one")
    match = _URL.fullmatch(str(prefix))
    if isinstance(prefix, RemotePath) or match is None:
        return Path(prefix) if isinstance(prefix, str) else prefix
    if match[1] in ("file", "local"):
        raise UserError(f"{prefix} is on this machine; name its path, without {match[1]}:")
    path = RemotePath(match[1].lower() + str(prefix)[match.end(1) :])
    if isinstance(prefix, str) and str(path) != prefix:
        raise UserError(f"{prefix} cannot be the prefix of a store; if you mean {path}, write that")
    return path


def _web_status(error: Exception) -> int | None:
    """With which the server answered, where it did; fsspec keeps it in the cause of some errors."""
    return getattr(error.__cause__ or error, "status", None)


def _version_of(files: Any, path: str) -> _Version | None:
    found = files.info(path)
    if found.get("type") == "directory":
        return None
    if found.get("size") is None:
        raise OSError("the server does not say how large it is")
    marks = (f"{name} {found[name]}" for name in _VERSIONS if found.get(name) is not None)
    return _Version(int(found["size"]), ", ".join(marks))


def _within(seconds: float, ask: Callable[[], _T]) -> _T:
    """What ``ask`` returns or raises; ``TimeoutError`` if that takes too long, and nobody waits for it then."""
    answers: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()

    def answer() -> None:
        try:
            answers.put((ask(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=answer, name="wlb-remote", daemon=True).start()
    try:
        value, error = answers.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
