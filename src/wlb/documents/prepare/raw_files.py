"""Reading one file of a corpus: text, JSON Lines or Parquet, plain or compressed.

Readers stream what they find: a text, a list of messages, or a ``Reject`` for an entry that is neither. A damaged
container makes the whole file an error.
"""

import codecs
import gzip
import io
import json
import shlex
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from wlb.errors import UserError, require
from wlb.terminal import beginning_of

COMPRESSED = (".gz", ".zst")
_PARQUET_ROWS = 64  # read at a time; a row may be a whole book


class Reject(StrEnum):
    """Why a document of the input is not in the store."""

    EMPTY = "empty"
    NO_TOKENS = "no_tokens"
    UNDECODABLE = "undecodable"
    BLANK_LINE = "blank_line"
    BAD_JSON = "bad_json"
    NO_FIELD = "missing_field"
    NOT_TEXT = "not_text"
    NOT_MESSAGES = "not_messages"
    NO_ASSISTANT = "no_assistant_message"
    SPECIAL_TOKEN = "special_token_in_message"
    TEMPLATE = "refused_by_chat_template"
    REWRITTEN = "rewritten_by_chat_template"


def one_per_line(path: Path) -> str:
    """The remedy for a JSON list where JSON Lines are read."""
    read = {".gz": "zcat", ".zst": "zstdcat"}.get(path.suffix.lower(), "cat")
    return f"write an entry per line: {read} {shlex.quote(str(path))} | jq -c '.[]' > NEW.jsonl"


def format_of(path: Path) -> str:
    """The suffix of the format, in front of a suffix of compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_text(path: Path) -> str | Reject:
    """The one document of a text file."""
    with opened(path) as file:
        return utf8_text(file.read(), "utf-8-sig")  # a byte order mark is part of the encoding of a file


def utf8_text(content: bytes | None, encoding: str = "utf-8") -> str | Reject:
    """UTF-8 bytes as a document; None (a null in a table) is rejected."""
    try:
        return as_text(None if content is None else content.decode(encoding))
    except UnicodeDecodeError:
        return Reject.UNDECODABLE


def as_text(value: Any) -> str | Reject:
    """``value`` as a document. JSON may escape half a surrogate pair, which no encoding can write."""
    if not isinstance(value, str):
        return Reject.NOT_TEXT
    try:
        value.encode()
    except UnicodeEncodeError:
        return Reject.UNDECODABLE
    return value or Reject.EMPTY


def read_lines(path: Path, start: int, end: float, document: Callable[[bytes], Any]) -> Iterator[Any]:
    """``document`` of every line that begins at byte ``start`` or later and before byte ``end``."""
    with opened(path) as file:
        position = 0
        if start:  # the line that holds the byte before ``start`` began earlier
            file.seek(start - 1)
            position = start - 1 + len(file.readline())
        for line in file:
            if position >= end:
                return
            yield document(line) if line.strip() else Reject.BLANK_LINE
            position += len(line)


def line_text(line: bytes) -> str | Reject:
    """A line of text as a document, without its line ending."""
    return utf8_text(line.rstrip(b"\r\n"), "utf-8-sig")


def json_line(line: bytes, document: Callable[[Any], Any]) -> Any:
    """``document`` of the value on a line of JSON."""
    try:
        return document(json.loads(line.decode("utf-8-sig")))
    except UnicodeDecodeError:
        return Reject.UNDECODABLE
    except (ValueError, RecursionError):
        return Reject.BAD_JSON


def read_parquet(
    path: Path, column: str, start: int, end: float, document: Callable[[Any], Any] | None
) -> Iterator[Any]:
    """The texts of a column in the row groups from byte ``start`` to ``end``, taking all groups as equally large.

    With ``document``, yields ``document(value)`` for every value of the column instead.
    """
    arrow, parquet = require("pyarrow", "data"), require("pyarrow.parquet", "data")
    try:
        with parquet.ParquetFile(path) as file:
            if column not in (names := file.schema_arrow.names):
                raise UserError(f"{path} has no column {column!r}, only {beginning_of(names)}; {choose_field(names)}")
            kind, types = file.schema_arrow.field(column).type, arrow.types
            kind = kind.value_type if types.is_dictionary(kind) else kind
            if not (document or types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind)):
                raise UserError(f"column {column!r} of {path} holds {kind}, not text; choose another with --text-field")
            size, count = path.stat().st_size, file.num_row_groups
            groups = [group for group in range(count) if start <= size * group // count < end]
            for batch in file.iter_batches(_PARQUET_ROWS, groups, columns=[column]):
                if document:
                    yield from (_entry(column, cell, document) for cell in batch.column(0))
                else:  # as bytes: text in Parquet may be invalid UTF-8, and one bad cell must not end the file
                    yield from map(utf8_text, batch.column(0).cast(arrow.large_binary()).to_pylist())
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from None


def _entry(column: str, cell: Any, document: Callable[[Any], Any]) -> Any:
    try:
        return document({column: cell.as_py()})
    except UnicodeDecodeError:
        return Reject.UNDECODABLE


def choose_field(names: Collection[str]) -> str:
    """The remedy if none of the fields ``names`` was the one to read."""
    return "choose one with --text-field" + (", or read messages with --chat" if "messages" in names else "")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The decompressed file."""
    try:
        with path.open("rb") as raw:
            if raw.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise UserError(
                    f"{path} is UTF-16; convert it first: iconv -f UTF-16 -t UTF-8 {shlex.quote(str(path))} > NEW"
                )
            file: Any = raw
            if path.suffix.lower() == ".gz":
                file = gzip.GzipFile(fileobj=raw)
            elif path.suffix.lower() == ".zst":
                file = io.BufferedReader(require("pyarrow", "data").CompressedInputStream(raw, "zstd"), 1 << 20)
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged or not a gzip file: {error}; replace it or leave it out") from None
    except OSError as error:  # of a damaged .zst too
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
