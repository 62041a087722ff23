"""Reading document lengths, all that planning needs of a corpus, from files, token stores or a random distribution.

``read_lengths`` takes a ``.json`` list or ``.jsonl`` file (of lengths, or of objects with ``length`` or
``input_ids``), a ``.txt`` with one length per line, the same on standard input (``-``), a ``.npy`` array, a ``.csv``,
``.tsv`` or ``.parquet`` file with such a column, all also as ``.gz``, the name of a token store, or
``synthetic:DOCUMENTS:WINDOW[:SEED]``, where WINDOW may be 128K, for lengths drawn by ``wlb.documents.synthetic``. It
checks that lengths are whole and positive, and keeps their order. It refuses text, and says how to count its tokens.
"""

import csv
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.prepare.chat import as_messages
from wlb.documents.prepare.raw_files import format_of, one_per_line, opened
from wlb.documents.prepare.sources import needs_documents
from wlb.documents.store.files import StoreSource, is_url, names_store, source_name, store_prefixes
from wlb.documents.store.index import read_index
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError, require
from wlb.terminal import beginning_of, number_of
from wlb.token_count import MOST_TOKENS, parse_count, parse_tokens

_STDIN = Path("standard input")
_LEAST_WINDOW, _MOST_WINDOW = 4096, 131_072  # of an assumed window

Lengths = NDArray[np.int64]
_NAMES = ("length", "lengths", "tokens", "num_tokens", "input_ids")  # that a column of lengths may have
_COUNTS = ("length", "lengths", "num_tokens")  # which hold no lists of tokens
_TABLE_OF_TEXT = "; if it is text, save it as Parquet or JSON Lines, which wlb check and wlb prepare read"
_LONGEST_LINE = 2**20  # bytes
_LONGEST_CELL = 2**31 - 1  # characters; a text column may exceed csv's own limit of 131,072


def what_was_read(source: str, lengths: Lengths, context_window: int | None = None) -> str:
    """One line about ``source``: documents, tokens, typical lengths, and how many documents exceed the window."""
    trained = np.sort(lengths[lengths > 0])
    empty = f" and {len(lengths) - len(trained):,} empty" if len(trained) < len(lengths) else ""
    said = f"read {source}: {number_of(len(trained), 'document')}{empty}, {number_of(int(trained.sum()), 'token')}"
    if not len(trained):
        return said
    said += f"; median {trained[(len(trained) - 1) // 2]:,}, longest {trained[-1]:,}"
    said += f"; documents up to {_covering_95_percent(lengths):,} cover 95% of tokens"
    if context_window is not None:
        over = int((trained > context_window).sum())
        said += f"; {f'{over:,}' if over else 'none'} over the window of {context_window:,}"
    return said


def assumed_window(lengths: Lengths) -> int:
    """The smallest power of two, from 4K to 128K, that covers 95% of tokens, else 128K."""
    return min(max(_LEAST_WINDOW, 1 << (_covering_95_percent(lengths) - 1).bit_length()), _MOST_WINDOW)


def described_window(window: int, lengths: Lengths) -> str:
    """The message that ``window`` was assumed by ``assumed_window``."""
    share = 100 * int(lengths[lengths <= window].sum()) // max(1, int(lengths.sum()))
    longest = "the longest default; " if share < 95 else ""
    return f"--context-window {window} ({longest}covers {share}% of tokens)"


def _covering_95_percent(lengths: Lengths) -> int:
    """The least length such that documents up to it have 95% of all tokens."""
    ascending = np.sort(lengths)
    tokens = np.cumsum(ascending)
    return int(ascending[np.searchsorted(100 * tokens, 95 * tokens[-1])])


def read_lengths(source: StoreSource, *, column: str | None = None) -> Lengths:
    """Tokens of every document of ``source``, in order; shape (documents,).

    ``column`` names the column of a table, or the field of JSON objects, with the lengths. Only a store may have empty
    documents, which the order of a job counts.

    Raises ``UserError`` if there are no lengths, or if one is not a whole number from 1 to 2**31 - 1.
    """
    path = _STDIN if source == "-" else Path(source_name(source))
    read = _from_txt if path == _STDIN else _READERS.get(format_of(path))
    if column is not None and read not in (_from_csv, _from_json, _from_parquet):
        raise UserError(f"--length-column {column} is for tables, and {path} has no columns; leave it out")
    if str(source).startswith("synthetic:"):
        return _synthetic(str(source))
    is_missing = path != _STDIN and not os.path.exists(path)
    if read is None or is_url(source_name(source)) or (is_missing and names_store(source)):
        return _from_store(source)
    if is_missing:
        raise UserError(f"lengths {path} does not exist; name a file of lengths or a token store")
    lengths = read(path, column)
    if not len(lengths):
        raise UserError(f"{path} holds no document lengths")
    return lengths


def _if_text(path: Path, entry: Any) -> str:
    """The end of a message: how to count the tokens of ``path`` if its first ``entry`` is text or a conversation."""
    name, options, chats = shlex.quote(str(path)), "", list[str]()
    if isinstance(entry, dict):
        texts = [field for field in entry if isinstance(entry[field], str) and field not in _NAMES]
        texts.sort(key=lambda field: -len(entry[field]))
        chats = [field for field in entry if isinstance(as_messages(entry[field]), list)]
        fields, usual = (chats, "messages") if chats else (texts, "text")
        if not fields:
            return ""
        options = " --chat" * bool(chats) + f" --text-field {shlex.quote(fields[0])}" * (usual not in fields)
    elif not isinstance(entry, str) or path == _STDIN:
        return ""
    elif needs_documents(path):
        options = " --documents lines"
    known, what = (" --tokenizer DIRECTORY", "holds conversations") if chats else ("", "is text")
    return (
        f"; if it {what}, count its tokens with: wlb check {name}{options}{known or ' --tokenizer bytes'}, or store "
        f"them with: wlb prepare {name}{options}{known} --out STORE "
        + ("(DIRECTORY has the tokenizer)" if chats else "(or give a tokenizer's directory for bytes)")
    )


def _column(path: Path, place: str, names: Collection[str], wanted: str | None, advice: Callable[[], str]) -> str:
    """Which of the columns ``names`` has the lengths. Raises ``UserError``, with ``advice``, if none has."""
    for name in _NAMES if wanted is None else [wanted]:
        if name in names:
            return name
    there = beginning_of(names) or "none"
    if wanted is not None:
        raise UserError(f"{path}{place} has no column {wanted!r}, but {there}; name one of those")
    raise UserError(f"{path}{place} has no column 'length' (--length-column names another), but {there}{advice()}")


def _from_json(path: Path, column: str | None) -> Lengths:
    """Lengths from JSON values: a number is a length, a list of token ids has one."""
    where, rows = "entry" if format_of(path) == ".json" else "line", _json_rows(path)
    advice = _if_text(path, rows[0] if rows else None)
    if advice and where == "entry":
        advice = f"; if it is text, {one_per_line(path)}"

    def lengths() -> Iterator[tuple[int, Any]]:
        for number, said in enumerate(rows, int(where == "line")):
            name = None
            if isinstance(said, dict):
                name = _column(path, f": {where} {number}", said, column, lambda: advice)
                said = said[name]
            elif column is not None:
                raise UserError(f"{path}: {where} {number} has no fields; leave out --length-column {column}")
            yield number, len(said) if isinstance(said, list) and name not in _COUNTS else said

    return _integers(path, where, lengths(), advice)


def _json_rows(path: Path) -> list[Any]:
    """The entries of a JSON list, or the value on each line of a .jsonl file."""
    place, values = "", []
    with opened(path) as file:
        content = file.read()
    try:
        if format_of(path) == ".json":
            values = json.loads(content)
        else:
            for number, line in enumerate(content.rstrip().splitlines(), 1):
                place = f": line {number}"
                values.append(json.loads(line))
    except (ValueError, RecursionError) as error:
        advice = _if_text(path, first) if not place and isinstance(first := _first_entry(content), dict) else ""
        raise UserError(f"{path}{place} is not valid JSON: {error}{advice}") from None
    if not isinstance(values, list):
        raise UserError(f"{path} holds a JSON {type(values).__name__}; a list of lengths is needed")
    return values


def _first_entry(content: bytes) -> Any:
    """The first line of ``content``: a JSON value, other text, or None if it is neither."""
    line = content.partition(b"\n")[0].decode(errors="replace")
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line if line.isprintable() and "\ufffd" not in line else None


def _from_txt(path: Path, _: str | None) -> Lengths:
    try:
        if path == _STDIN:
            text = sys.stdin.read().removeprefix("\ufeff")
        else:
            with opened(path) as file:
                text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8; write one length per line as plain text") from None
    lines = enumerate(text.rstrip().splitlines(), 1)
    return _integers(path, "line", ((number, _parsed(line)) for number, line in lines), _if_text(path, text))


def _from_csv(path: Path, column: str | None) -> Lengths:
    csv.field_size_limit(_LONGEST_CELL)
    with opened(path) as raw:
        file = io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline="")
        # Strict, because an unclosed quote would turn the rest of the file into one cell.
        rows = csv.reader(file, delimiter="\t" if format_of(path) == ".tsv" else ",", strict=True)
        try:
            heading = [name.strip() for name in next(rows, _NAMES)]
            place = heading.index(_column(path, "", heading, column, lambda: _TABLE_OF_TEXT))
            cells = ((rows.line_num, "".join(row[place : place + 1])) for row in rows if row)
            return _integers(path, "line", ((line, _parsed(cell)) for line, cell in cells))
        except csv.Error as error:
            raise UserError(f"{path} is not a CSV file: line {rows.line_num}: {error}") from None


def _parsed(text: str) -> int | str:
    """``text`` as a whole number, or else unchanged."""
    count = parse_count(text.strip())
    return text.strip() if count is None else count


def _integers(path: Path, where: str, numbered: Iterable[tuple[int, Any]], if_text: str = "") -> Lengths:
    """Check that all values are lengths; each comes with its place in the file."""
    values = []
    for place, value in numbered:
        if type(value) is not int:  # bool is a subclass of int, but not a length
            advice = if_text if isinstance(value, str) and any(map(str.isalpha, value)) else ""
            raise UserError(f"{path}: {where} {place} is {str(value)[:40]!r}; a whole number is needed{advice}")
        if not 1 <= value <= MOST_TOKENS:  # before int64, which holds fewer values than int
            raise _out_of_range(path, where, place, value)
        values.append(value)
    return np.array(values, np.int64)


def _in_range(path: Path, where: str, lengths: NDArray[np.integer[Any]], places: Sequence[int]) -> Lengths:
    bad = np.flatnonzero((lengths < 1) | (lengths > MOST_TOKENS))
    if bad.size:
        at = int(bad[0])
        raise _out_of_range(path, where, places[at], int(lengths[at]))
    return lengths.astype(np.int64)


def _out_of_range(path: Path, where: str, place: int, length: int) -> UserError:
    return UserError(f"{path}: {where} {place} is {str(length)[:40]}; a document has 1 to {MOST_TOKENS} tokens")


def _from_npy(path: Path, _: str | None) -> Lengths:
    with opened(path) as file:
        try:
            array = np.load(io.BytesIO(file.read()), allow_pickle=False)
        except (ValueError, EOFError):  # NumPy's own message suggests loading pickles, which would run code
            array = None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        is_array = isinstance(array, np.ndarray)
        found = f"{array.dtype} values in shape {array.shape}" if is_array else "no NumPy array of numbers"
        raise UserError(f"{path} holds {found}; write whole numbers in one dimension with numpy.save")
    return _in_range(path, "entry", array, range(len(array)))


def _from_parquet(path: Path, column: str | None) -> Lengths:
    """Whole numbers, or the lengths of lists of token ids."""
    arrow, parquet = require("pyarrow", "data"), require("pyarrow.parquet", "data")
    lengths, compute = [], require("pyarrow.compute", "data")
    try:
        with parquet.ParquetFile(path) as file:

            def if_text() -> str:
                return _if_text(path, next((row for batch in file.iter_batches(1) for row in batch.to_pylist()), None))

            name = _column(path, "", file.schema_arrow.names, column, if_text)
            kind, types = file.schema_arrow.field(name).type, arrow.types
            has_ids = name not in _COUNTS and (types.is_list(kind) or types.is_large_list(kind))
            for batch in file.iter_batches(columns=[name]):
                cells = compute.list_value_length(batch.column(0)) if has_ids else batch.column(0)
                if cells.null_count or not types.is_integer(cells.type):
                    found = f"{kind} values" + (", some of them null" if cells.null_count else "")
                    raise UserError(f"column {name!r} of {path} holds {found}; whole numbers are needed")
                lengths.append(cells.to_numpy())
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    whole = np.concatenate(lengths or [np.empty(0, np.int64)])
    return _in_range(path, "row", whole, range(len(whole)))


def _from_store(source: StoreSource) -> Lengths:
    """The document lengths of a store, whose token files may be missing."""
    path = Path(source_name(source))
    try:
        prefixes = store_prefixes(source)
    except UserError as error:
        raise UserError(f"{error}{_if_text(path, str(path))}") if path.is_dir() else error from None
    if os.path.isfile(path) and not os.path.exists(f"{prefixes[0]}.idx"):
        kinds = f"lengths come from {', '.join(_READERS)}, .idx or a token store prefix"
        with opened(path) as file:
            first = _first_entry(file.readline(_LONGEST_LINE))
        raise UserError(
            f"{path} is of an unknown kind; {kinds}{_if_text(path, first if isinstance(first, str) else None)}"
        )
    if len(prefixes) == 1 and not is_url(prefixes[0]) and path.suffix != ".idx":
        with suppress(OSError):  # for which reading gives the reason
            if not Path(f"{prefixes[0]}.idx").exists():
                raise UserError(
                    f"neither {path} nor a token store {prefixes[0]}.idx exists; name a file of lengths, or make a "
                    f"store with: wlb prepare SOURCE --out {prefixes[0]}"
                )
    lengths = np.concatenate([read_index(f"{prefix}.idx").lengths() for prefix in prefixes])
    if not lengths.any():
        raise UserError(f"{path} holds no document with tokens")
    return lengths


def _synthetic(source: str) -> Lengths:
    parts = re.fullmatch(r"synthetic:([0-9]{1,20}):([^:]*)(?::([0-9]{1,20}))?", source)
    if parts is None:
        raise UserError(
            f"{source!r} is not of the form synthetic:DOCUMENTS:WINDOW[:SEED], in whole numbers; "
            "write it as synthetic:20000:128K:0"
        )
    return sample_lengths(int(parts[1]), parse_tokens(parts[2]), int(parts[3] or 0))


_READERS: dict[str, Callable[[Path, str | None], Lengths]] = {
    ".json": _from_json,
    ".txt": _from_txt,
    ".npy": _from_npy,
    ".csv": _from_csv,
    ".tsv": _from_csv,
    ".jsonl": _from_json,
    ".ndjson": _from_json,
    ".parquet": _from_parquet,
}
