"""Reading one file of a corpus: text, JSON, CSV or Parquet, plain or compressed.

Each reader has two halves. The first runs where batches are made and yields raw ``Item``s as a stream (a line, a table
cell; text files that are one document are items by their path). The second runs where they are tokenised and gives the
document of an item, or why there is none. A damaged container is an error of the whole file; a bad entry is a reject.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from wlb.documents.prepare.batches import Reject
from wlb.errors import UserError, require
from wlb.terminal import beginning_of

FileKind = Literal["text", "jsonl", "json", "csv", "parquet"]
_COMPRESSED = (".gz", ".zst")
# Megatron's and C4's corpora keep JSON Lines under plain .json names.
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LONGEST_CELL = 2**31 - 1  # characters; a long document has more than the 131,072 of csv's own limit
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
    """How a file is read: by its name and, of a .json file, by whether it is one list or JSON Lines."""
    suffix = format_suffix(path)
    if suffix in _JSON_LINES:
        return "json" if suffix == ".json" and path.is_file() and _begins_list(path) else "jsonl"
    if suffix in _DELIMITERS:
        return "csv"
    return "parquet" if suffix == ".parquet" else "text"


def _begins_list(path: Path) -> bool:
    with _open(path) as (file, _):
        return file.read(1 << 10).decode("utf-8-sig", "replace").lstrip().startswith("[")


def has_lines(path: Path) -> bool:
    """Whether there is text after the first line; also of a pipe, which cannot be looked into."""
    if not path.is_file():
        return True
    with _open(path) as (file, _):
        return any(line.strip() for line in islice(file, 1, None))


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


def file_lines(path: Path, start: int = 0, end: int | None = None) -> Iterator[Item]:
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


def line_text(line: bytes) -> list[str | Reject]:
    """A line of text as a document, without its end."""
    return utf8_text(line.rstrip(b"\r\n"), "utf-8-sig") if line.strip() else [Reject.BLANK_LINE]


def json_line(line: bytes) -> Any:
    """What a line of JSON says, or a ``Reject``."""
    if not line.strip():
        return Reject.BLANK_LINE
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Reject.UNDECODABLE
    except (ValueError, RecursionError):
        return Reject.BAD_JSON


def json_entries(path: Path) -> Iterator[Item]:
    """The entries of a JSON list, which is read whole."""
    with _open(path) as (file, raw):
        content, size = file.read(), raw.tell()
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a valid JSON list: {error}") from None
    for entry in entries:
        yield Item(entry, len(content) // len(entries), size // len(entries))


def entry_document(entry: Any, field: str, checked: Callable[[Any], Any]) -> list[Any]:
    """What a JSON object has in ``field``, or a JSON string itself, as far as it is ``checked``."""
    if isinstance(entry, Reject):
        return [entry]
    if isinstance(entry, str):
        return [checked(entry)]
    return [checked(entry[field]) if isinstance(entry, dict) and field in entry else Reject.NO_FIELD]


def line_document(line: bytes, field: str, checked: Callable[[Any], Any]) -> list[Any]:
    """The same of a line of JSON."""
    return entry_document(json_line(line), field, checked)


def as_text(value: Any) -> str | Reject:
    """``value`` where it is a text."""
    return value if isinstance(value, str) else Reject.NOT_TEXT


def fields_of(item: Any) -> list[str]:
    """The names of the fields of a JSON object, which may be a line; none of what is no object."""
    entry = json_line(item) if isinstance(item, bytes) else item
    return [*entry] if isinstance(entry, dict) else []


def csv_rows(path: Path, text: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """The rows of ``text``, the CSV or TSV file ``path``, each with the number of its last line; no blank ones."""
    csv.field_size_limit(_LONGEST_CELL)
    # Strict: a quote that is never closed would make one cell of all that follows it.
    reader = csv.reader(text, delimiter=_DELIMITERS[format_suffix(path)], strict=True)
    try:
        yield from ((reader.line_num, row) for row in reader if row)
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV file: line {reader.line_num}: {error}") from None


def csv_cells(path: Path, column: str) -> Iterator[Item]:
    """The cells of a column, as UTF-8 bytes; None where a row ends before it."""
    with _open(path) as (file, raw):
        # As surrogates: one bad cell is not the file's end.
        rows = csv_rows(path, io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=""))
        header = next(rows, None)
        if header is None:
            return
        names = [name.strip() for name in header[1]]
        if column not in names:
            raise _no_column(path, column, names)
        index, position = names.index(column), 0
        for _, row in rows:
            cell = row[index].encode(errors="surrogateescape") if index < len(row) else None
            now = raw.tell()
            yield Item(cell, len(cell or b""), now - position)
            position = now


def parquet_cells(path: Path, column: str, share: int, shares: int, chat: bool) -> Iterator[Item]:
    """The cells of a column, in one of ``shares`` runs of the file's row groups.

    They are UTF-8 bytes or None; with ``chat`` objects that have the column's value, as entries of JSON have.
    """
    arrow = require("pyarrow", "data")
    parquet = require("pyarrow.parquet", "data")
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(arrow, file, path, column, chat)
            progress = path.stat().st_size // max(file.metadata.num_rows, 1)
            groups = range(*(file.num_row_groups * cut // shares for cut in (share, share + 1)))
            for batch in file.iter_batches(_PARQUET_ROWS, groups, columns=[column]):
                if chat:
                    for entry in batch.to_pylist():
                        yield Item(entry, batch.nbytes // len(batch), progress)
                    continue
                # As bytes: text of a Parquet file need not be valid UTF-8, and one bad cell is not the file's end.
                for cell in batch.column(0).cast(arrow.large_binary()).to_pylist():
                    yield Item(cell, len(cell or b""), progress)
    except arrow.ArrowException as error:
        raise UserError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or str(error).splitlines()[0]}") from error


def _no_column(path: Path, column: str, names: Sequence[str]) -> UserError:
    return UserError(f"{path} has no column {column!r}, only {beginning_of(names)}; {choose_field(names)}")


def choose_field(names: Collection[str]) -> str:
    """What to do where none of the fields ``names`` was the one to read."""
    return "choose one with --text-field" + (", or read messages with --chat" if "messages" in names else "")


def _check_column(arrow: Any, file: Any, path: Path, column: str, chat: bool) -> None:
    names = file.schema_arrow.names
    if column not in names:
        raise _no_column(path, column, names)
    kind = file.schema_arrow.field(column).type
    if chat:  # each value is checked
        return
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_binary(kind)):
        raise UserError(f"column {column!r} of {path} holds {kind}, not text; choose another with --text-field")


@contextmanager
def _open(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The decompressed file, and the raw one, whose position tells progress."""
    try:
        with path.open("rb") as raw:
            if raw.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise UserError(f"{path} is UTF-16; convert it first: iconv -f UTF-16 -t UTF-8 {path} > NEW")
            raw.seek(0)
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
