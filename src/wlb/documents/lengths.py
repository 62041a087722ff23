"""Reading document lengths from files, stores or a random distribution: all that planning needs of a corpus.

``read_lengths`` takes a ``.json`` list or ``.jsonl`` file (of lengths, or of objects with ``length`` or
``input_ids``), a ``.txt`` with one length per line, the same on standard input (``-``), a ``.npy`` array, a ``.csv``,
``.tsv`` or ``.parquet`` file with a column ``length``, what names a token store, or
``synthetic:DOCUMENTS:WINDOW[:SEED]``, where WINDOW may be 128K, for lengths drawn by ``wlb.documents.synthetic``. What
it returns is checked: whole, positive, in order. Text is refused in a line that says how to count its tokens.

``read_encoder_tokens`` reads what else JSON and Parquet may say: what documents put through encoders of images or
audio.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store.files import is_url
from wlb.documents.store.index import MAX_DOCUMENT_TOKENS, read_index
from wlb.documents.store.sources import StoreSource, names_store, source_name, store_prefixes
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError, require
from wlb.terminal import beginning_of, number_of, tell
from wlb.token_count import parse_count, parse_tokens

_STDIN = Path("standard input")
_LEAST_WINDOW, _MOST_WINDOW = 4096, 131_072  # that are assumed

Integers = NDArray[np.integer[Any]]
_NAMES = ("length", "lengths", "tokens", "num_tokens")  # of a column of lengths
_LONGEST_CELL = 2**31 - 1  # characters; a column of text beside has more than the 131,072 of csv's own limit
_ENCODED = "_tokens"  # how columns of encoders' tokens end


class ReadLengths(NamedTuple):
    """Tokens of every document, shape (documents,), and what they were read from, in words."""

    source: str
    lengths: NDArray[np.int64]


def what_was_read(source: str, lengths: NDArray[np.int64], context_window: int | None = None) -> str:
    """What was read from ``source``, in a line: documents and tokens, how long they are, how many over the window."""
    trained, tokens = _ascending(lengths)
    empty = f" and {len(lengths) - len(trained):,} empty" if len(trained) < len(lengths) else ""
    said = f"read {source}: {number_of(len(trained), 'document')}{empty}, {number_of(int(trained.sum()), 'token')}"
    if not len(trained):
        return said
    said += f"; median {trained[(len(trained) - 1) // 2]:,}, longest {trained[-1]:,}"
    said += f"; documents up to {_holding(95, trained, tokens):,} hold 95% of all tokens"
    if context_window is not None:
        over = len(trained) - int(np.searchsorted(trained, context_window, side="right"))
        said += f"; {f'{over:,}' if over else 'none'} over the window of {context_window:,}"
    return said


def assumed_window(lengths: NDArray[np.int64]) -> int:
    """The power of two, from 4K to 128K, up to which documents hold 95% of all tokens; 128K where none is enough."""
    trained, tokens = _ascending(lengths)
    longest = _holding(95, trained, tokens) if len(trained) else 1
    return min(max(_LEAST_WINDOW, 1 << (longest - 1).bit_length()), _MOST_WINDOW)


def described_window(window: int, lengths: NDArray[np.int64]) -> str:
    """How to say that ``window`` is ``assumed_window``."""
    share = 100 * int(lengths[lengths <= window].sum()) // max(1, int(lengths.sum()))
    longest = ", the longest we assume" if share < 95 else ""
    return f"window {window:,}{longest}: documents up to it hold {share}% of all tokens (--context-window)"


def _ascending(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The lengths of documents that are not empty, the shortest first, and the tokens of each and all before it."""
    trained = np.sort(lengths[lengths > 0])
    return trained, np.cumsum(trained)


def _holding(percent: int, ascending: NDArray[np.int64], tokens: NDArray[np.int64]) -> int:
    """The least length such that documents up to it hold ``percent`` of all tokens."""
    return int(ascending[np.searchsorted(100 * tokens, percent * tokens[-1])])


def read_lengths(source: StoreSource, *, keep_empty: bool = False) -> NDArray[np.int64]:
    """Tokens of every document of ``source``, in order; shape (documents,).

    Empty documents, which only a store may have, are left out, with a note on stderr, unless ``keep_empty``: the order
    in which a job trains its documents counts them.

    Raises ``UserError`` when there are none, or when one is not a whole number from 1 to 2**31 - 1, with its
    position.
    """
    if str(source).startswith("synthetic:"):
        return _synthetic(str(source))
    path = _STDIN if source == "-" else Path(source_name(source))
    read, where = _READERS.get(path.suffix.lower(), (None, ""))
    try:
        if path == _STDIN:
            lengths, where = _from_txt(path), "line"
        elif read is None or is_url(source_name(source)) or (not path.exists() and names_store(source)):
            (path, lengths), where = _from_store(source), "document"
        else:
            lengths = read(path)
    except FileNotFoundError:
        raise UserError(f"lengths {path} does not exist") from None
    except OSError as error:
        raise UserError(f"lengths {path} cannot be read: {error.strerror or error}") from error
    if not len(lengths):
        raise UserError(f"{path} holds no document lengths")
    smallest = 0 if where == "document" else 1  # stores may have empty documents, and training passes over them
    bad = np.flatnonzero((lengths < smallest) | (lengths > MAX_DOCUMENT_TOKENS))
    if bad.size:
        # Lines are counted from 1, entries of arrays and documents from 0.
        raise UserError(
            f"{path}: {where} {int(bad[0]) + (where == 'line')} is {lengths[bad[0]]}; a document has 1 to "
            f"{MAX_DOCUMENT_TOKENS} tokens"
        )
    tokens = lengths.astype(np.int64)
    trained = tokens[tokens > 0]
    if keep_empty or len(trained) == len(tokens):
        return tokens
    if not trained.size:
        raise UserError(f"{path} holds only empty documents")
    tell(f"wlb: note: {path}: {number_of(len(tokens) - len(trained), 'empty document')} passed over")
    return trained


def read_encoder_tokens(source: StoreSource) -> dict[str, NDArray[np.int64]]:
    """Tokens (patches, frames) of every document in each encoder: the columns ``NAME_tokens``, by NAME.

    Shape (documents,) each; none where ``source`` is no JSON or Parquet file that has any. Raises ``UserError`` for
    what is no whole number of at least 0.
    """
    path, found = Path(source_name(source)), {}
    if path.suffix == ".parquet" and path.is_file():
        schema = require("pyarrow.parquet", "data").read_schema(path)
        found = {name: _from_parquet(path, name) for name in schema.names if name.endswith(_ENCODED)}
    elif path.suffix in (".json", ".jsonl") and path.is_file():
        rows = _json_rows(path)
        names = sorted({name for row in rows if isinstance(row, dict) for name in row if name.endswith(_ENCODED)})
        found = {name: _from_integers(path, [row.get(name) for row in rows], f"{name} of entry") for name in names}
    for name, tokens in found.items():
        if tokens.size and tokens.min() < 0:
            raise UserError(f"{path}: {name} of document {tokens.argmin()} is {tokens.min()}; give at least 0")
    return {name.removesuffix(_ENCODED): tokens.astype(np.int64) for name, tokens in found.items()}


def _if_text(path: Path) -> str:
    """The end of a message: what to do where ``path`` has text."""
    if path == _STDIN:
        return ""
    if path.suffix in (".csv", ".tsv"):
        return "; if it is text, save it as Parquet or JSON Lines, which wlb check and wlb prepare read"
    name = shlex.quote(str(path)) + " --documents lines" * (path.suffix == ".txt")
    return (
        f"; if it is text, count its tokens with: wlb check {name} --tokenizer bytes, or store them with: "
        f"wlb prepare {name} --out STORE (or give a tokenizer's directory for bytes)"
    )


def _from_json(path: Path) -> Integers:
    """The lengths that values of JSON say, or count."""
    where, lengths = "line" if path.suffix == ".jsonl" else "entry", []
    for number, row in enumerate(_json_rows(path), int(where == "line")):
        said = row
        if isinstance(row, dict):
            if not {"length", "input_ids"} & row.keys():
                found = beginning_of(row)
                raise UserError(
                    f"{path}: {where} {number} has neither length nor input_ids, but {found}{_if_text(path)}"
                )
            said = row["length"] if "length" in row else row["input_ids"]
        lengths.append(len(said) if isinstance(said, list) else said)
    return _from_integers(path, lengths, where)


def _json_rows(path: Path) -> list[Any]:
    """The entries of a list, or of a .jsonl file what each line says."""
    place, values = "", []
    try:
        if path.suffix == ".json":
            values = json.loads(path.read_bytes())
        else:
            for number, line in enumerate(path.read_bytes().splitlines(), 1):
                place = f": line {number}"
                values.append(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}{place} is not valid JSON: {error}{'' if place else _if_text(path)}") from None
    if not isinstance(values, list):
        raise UserError(f"{path} holds a JSON {type(values).__name__}; a list of lengths is needed")
    return values


def _from_txt(path: Path) -> Integers:
    try:
        lines = (sys.stdin.read() if path == _STDIN else path.read_text(encoding="utf-8-sig")).rstrip().splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8; write one length per line as plain text") from None
    return _from_texts(path, enumerate(lines, 1))


def _from_csv(path: Path) -> Integers:
    """The column ``length``, or another of ``_NAMES``."""
    csv.field_size_limit(_LONGEST_CELL)
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        # Strict: a quote that is never closed would make one cell of all that follows it.
        rows = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            heading = [name.strip() for name in next(rows, [])]
            column = next((heading.index(name) for name in _NAMES if name in heading), -1)
            if heading and column < 0:
                found = beginning_of(heading)
                raise UserError(
                    f"{path} has no column 'length', but {found}; give the column of lengths that name{_if_text(path)}"
                )
            return _from_texts(path, ((rows.line_num, dict(enumerate(row)).get(column, "")) for row in rows if row))
        except csv.Error as error:
            raise UserError(f"{path} is not a CSV file: line {rows.line_num}: {error}") from None


def _from_texts(path: Path, texts: Iterable[tuple[int, str]]) -> Integers:
    """Whole numbers as text, each with the number of its line."""
    lengths = []
    for number, text in texts:
        size = parse_count(text.strip())
        if size is None:
            raise _no_whole_number(path, "line", number, text.strip())
        lengths.append(size)
    return _from_integers(path, lengths, "line")


def _no_whole_number(path: Path, where: str, position: int, value: Any) -> UserError:
    advice = _if_text(path) if isinstance(value, str) and any(map(str.isalpha, value)) else ""
    return UserError(f"{path}: {where} {position} is {str(value)[:40]!r}; a whole number is needed{advice}")


def _from_integers(path: Path, values: Sequence[Any], where: str) -> Integers:
    for position, value in enumerate(values, int(where == "line")):
        # bool is a subclass of int, and is no length.
        if type(value) is not int or abs(value) > np.iinfo(np.int64).max:
            raise _no_whole_number(path, where, position, value)
    return np.array(values, np.int64)


def _from_npy(path: Path) -> Integers:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError):  # NumPy's own words advise to load pickles, which would run code
        raise UserError(f"{path} is not a NumPy array of numbers; write one with numpy.save") from None
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        shape = getattr(array, "shape", "none")
        raise UserError(f"{path} has shape {shape}; one dimension, one length per document, is needed")
    return _from_integer_array(path, array)


def _from_parquet(path: Path, name: str = "length") -> Integers:
    parquet = require("pyarrow.parquet", "data")
    arrow = require("pyarrow", "data")
    try:
        with parquet.ParquetFile(path) as file:
            if name not in file.schema_arrow.names:
                names = file.schema_arrow.names
                raise UserError(f"{path} has no column {name!r}; it has {beginning_of(names)}{_if_text(path)}")
            column = file.read([name])[name]
    except arrow.ArrowException as error:
        raise UserError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    if column.null_count:
        bad = column.is_null().to_numpy().argmax()
        raise UserError(f"{path}: row {bad} of column {name!r} is null; a whole number is needed")
    return _from_integer_array(path, column.to_numpy())


def _from_integer_array(path: Path, array: NDArray[Any]) -> Integers:
    if array.dtype.kind not in "iu":
        first = f", entry 0 is {array[0]!r}" if array.size else ""
        raise UserError(f"{path} holds {array.dtype} values{first}; whole numbers are needed")
    return array


def _from_store(source: StoreSource) -> tuple[Path, Integers]:
    """What to call a store, whose token files need not be there, and the lengths of its documents in order."""
    try:
        prefixes = store_prefixes(source)
    except UserError as error:
        path = Path(source_name(source))
        raise UserError(f"{error}{_if_text(path)}") if path.is_dir() else error from None
    only = prefixes[0] if len(prefixes) == 1 else None
    if only and not (is_url(only) or str(source).endswith(".idx") or Path(f"{only}.idx").exists()):
        if os.path.isfile(only):
            raise UserError(
                f"{only} is of no known kind; lengths come from {', '.join(_READERS)}, .idx or a token store prefix"
                f"{_if_text(Path(only))}"
            )
        raise UserError(
            f"neither {only} nor a token store {only}.idx exists; name a file of lengths, or make a store with: "
            f"wlb prepare SOURCE --out {only}"
        )
    lengths = np.concatenate([read_index(f"{prefix}.idx").lengths() for prefix in prefixes])
    return Path(f"{only}.idx" if only else source_name(source)), lengths


def _synthetic(source: str) -> NDArray[np.int64]:
    fields = source.split(":")[1:]
    documents, window, seed = (*fields, "0", "0")[:3]
    count, first = parse_count(documents), parse_count(seed)
    if len(fields) not in (2, 3) or count is None or first is None:
        raise UserError(
            f"{source!r} is not of the form synthetic:DOCUMENTS:WINDOW[:SEED], in whole numbers; "
            "write it as synthetic:20000:128K:0"
        )
    return sample_lengths(count, parse_tokens(window), first)


# How a file is read, and what messages call the place of a length in it.
_READERS: dict[str, tuple[Callable[[Path], Integers], str]] = {
    ".json": (_from_json, "entry"),
    ".txt": (_from_txt, "line"),
    ".npy": (_from_npy, "entry"),
    ".csv": (_from_csv, "line"),
    ".tsv": (_from_csv, "line"),
    ".jsonl": (_from_json, "line"),
    ".parquet": (_from_parquet, "row"),
}
