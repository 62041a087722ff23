"""Reading one file of a corpus: text, JSON Lines or Parquet, plain or compressed.

Each reader has two halves. The first runs where batches are made and yields raw ``Item``s as a stream (a line, a table
cell; text files are items by their path). The second, ``..._text``, runs where they are tokenised and gives the
document of an item, or why there is none. A damaged container is an error of the whole file; a bad entry is a reject.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from wlb.documents.prepare.batches import Reject
from wlb.errors import UserError, require

FileKind = Literal["text", "jsonl", "parquet"]
_COMPRESSED = (".gz", ".zst")
# Megatron's and C4's corpora keep JSON Lines under plain .json names.
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET_ROWS = 64  # read at a time; rows may be whole books


class Item(NamedTuple):
    """One raw item: its content, about how many bytes that is, and how many bytes of source it used up."""

    content: Any
    size: int
    progress: int


def format_suffix(path: Path) -> str:
    """The suffix that tells the format, below a suffix that tells the compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def file_kind(path: Path) -> FileKind:
    """How a file is read, by its name: JSON Lines, Parquet, or else text."""
    suffix = format_suffix(path)
    if suffix in _JSON_LINES:
        return "jsonl"
    return "parquet" if suffix == ".parquet" else "text"


def read_text(path: Path) -> list[str | Reject]:
    """The one document of a text file."""
    with _open(path) as (file, _):
        # A byte order mark is part of the encoding of a file, not of its text.
        return utf8_text(file.read(), "utf-8-sig")


def utf8_text(content: bytes | None, encoding: str = "utf-8") -> list[str | Reject]:
    """UTF-8 bytes as text; None (a null of a table) is no text."""
    if content is None:
        return [Reject.NOT_TEXT]
    try:
        return [content.decode(encoding)]
    except UnicodeDecodeError:
        return [Reject.UNDECODABLE]


def is_compressed(path: Path) -> bool:
    """Whether a file, by its name, can only be read from its beginning."""
    return path.suffix.lower() in _COMPRESSED


def json_lines(path: Path, start: int = 0, end: int | None = None) -> Iterator[Item]:
    """The lines of a file that begin at byte ``start`` or later and before byte ``end``, undecoded.

    A compressed file is only read whole.
    """
    with _open(path) as (file, raw):
        position = start
        if start:  # the line that holds the byte before it began earlier
            file.seek(start - 1)
            file.readline()
            position = file.tell()
        for line in file:
            if end is not None and position >= end:
                return
            now = raw.tell()
            yield Item(line, len(line), now - position)
            position = now


def json_field(line: bytes, field: str) -> Any:
    """What one JSON object has in ``field``, or a ``Reject``."""
    if not line.strip():
        return Reject.BLANK_LINE
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Reject.UNDECODABLE
    except (ValueError, RecursionError):
        return Reject.BAD_JSON
    return record[field] if isinstance(record, dict) and field in record else Reject.NO_FIELD


def json_fields(line: bytes) -> list[str]:
    """The names of the fields of one JSON object; none of what is no object."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return []
    return [*record] if isinstance(record, dict) else []


def json_line_text(line: bytes, field: str) -> list[str | Reject]:
    """The text in ``field`` of one JSON object."""
    text = json_field(line, field)
    return [text if isinstance(text, str) else Reject.NOT_TEXT]


def parquet_cells(path: Path, column: str, share: int = 0, shares: int = 1) -> Iterator[Item]:
    """The cells of a text column, as UTF-8 bytes or None, in one of ``shares`` runs of the file's row groups."""
    arrow = require("pyarrow", "data")
    parquet = require("pyarrow.parquet", "data")
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(arrow, file, path, column)
            progress = path.stat().st_size // max(file.metadata.num_rows, 1)
            groups = range(*(file.num_row_groups * cut // shares for cut in (share, share + 1)))
            for batch in file.iter_batches(_PARQUET_ROWS, groups, columns=[column]):
                # As bytes: text of a Parquet file need not be valid UTF-8, and one bad cell is not the file's end.
                for cell in batch.column(0).cast(arrow.large_binary()).to_pylist():
                    yield Item(cell, len(cell or b""), progress)
    except arrow.ArrowException as error:
        raise UserError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or str(error).splitlines()[0]}") from error


def _check_column(arrow: Any, file: Any, path: Path, column: str) -> None:
    names = file.schema_arrow.names
    if column not in names:
        raise UserError(f"{path} has no column {column!r}, only {', '.join(names)[:80]}; choose one with --text-field")
    kind = file.schema_arrow.field(column).type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_binary(kind)):
        raise UserError(f"column {column!r} of {path} holds {kind}, not text; choose another with --text-field")


@contextmanager
def _open(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The decompressed file, and the raw one, whose position tells progress."""
    try:
        with path.open("rb") as raw:
            yield _decompressed(path, raw), raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged or no gzip file: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    match path.suffix.lower():
        case ".gz":
            return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]  # a binary reader in all but name
        case ".zst":
            return io.BufferedReader(_ZstdStream(path, raw), 1 << 20)
    return raw


class _ZstdStream(io.RawIOBase):
    """Frames of a Zstandard file as one stream; zstandard's own reader takes a truncated file for a whole one."""

    def __init__(self, path: Path, raw: BinaryIO) -> None:
        self._zstandard = require("zstandard", "data")
        self._path = path
        self._raw = raw
        self._frame: Any = None
        self._decoded = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decoded:
            data = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            data = data or self._raw.read(1 << 17)
            if not data:
                if self._frame is not None and not self._frame.eof:
                    raise UserError(f"{self._path} is truncated: its last Zstandard frame does not end")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                self._decoded = memoryview(self._frame.decompress(data))
            except self._zstandard.ZstdError as error:
                raise UserError(f"{self._path} is damaged or no Zstandard file: {error}") from None
        count = min(len(buffer), len(self._decoded))
        buffer[:count] = self._decoded[:count]
        self._decoded = self._decoded[count:]
        return count
