"""Stores on object storage and web servers: prefixes that are URLs of ``fsspec``, such as ``s3://bucket/corpus``.

A ``RemotePath`` is such a URL as a ``Path``, so a store opens by the same steps wherever it lies. Files that are
mapped or parsed (``.idx``, ``.json``) are brought whole into a temporary file. Of token files and masks,
``RemoteArray`` reads blocks, of which ``fsspec`` keeps the last ones in memory.

The size and version (ETag, checksum or date) of a file are noted when it is first looked at, and compared after every
read, so tokens of two versions are never mixed. A read that fails or is cut short is repeated a few times; after that
it is a ``UserError``.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PosixPath
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError, require

_T = TypeVar("_T")

_TRIES = 6
_FIRST_DELAY = 1.0  # seconds before the second try; doubles with each
_BLOCK = 2 << 20  # bytes read of a token file: no more takes the time that a request takes anyway, on 1 Gbit/s
_BLOCKS = 64  # that are kept of a file
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

    All raise ``UserError`` where the server fails; ``open`` brings the whole file into a temporary one.
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
        file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
        file.writelines(self.pieces())
        file.seek(0)
        return file

    def pieces(self) -> Iterator[bytes]:
        """The file in order. Raises ``UserError`` if it is no longer what it was."""
        for start in range(0, self._found.size, _PIECE):
            yield self.read(start, start + _PIECE)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes from ``start`` to ``stop``, or to the end, of the version that was found at first."""
        stop = min(stop, self._found.size)

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

    def _tried(self, ask: Callable[[Any, str], _T]) -> _T:
        """The answer to ``ask``, several times if need be. Raises ``FileNotFoundError`` where that is the answer."""
        files, path = self._opened()
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_FIRST_DELAY * 2 ** (attempt - 1))
            try:
                return ask(files, path)
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
        self._dtype = dtype
        self.nbytes = path.stat().st_size
        self._cache = require("fsspec.caching", "remote").BlockCache(_BLOCK, path.read, self.nbytes, _BLOCKS)

    def __getitem__(self, places: slice) -> NDArray[Any]:
        """A read-only copy. Raises ``UserError`` where it cannot be read, or the file has changed."""
        size = self._dtype.itemsize
        start, stop, _ = places.indices(self.nbytes // size)
        if start >= stop:
            return np.empty(0, self._dtype)
        return np.frombuffer(self._cache._fetch(start * size, stop * size), self._dtype)


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
