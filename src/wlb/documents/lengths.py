"""Reading document lengths, all that planning needs of a corpus, from files, token stores or a random distribution.

``read_lengths`` takes a ``.json`` list or ``.jsonl`` file (of lengths, or of objects with ``length`` or
``input_ids``), a ``.txt`` with one length per line, the same on standard input (``-``), a ``.npy`` array, a ``.csv``,
``.tsv`` or ``.parquet`` file with a column ``length``, the name of a token store, or
``synthetic:DOCUMENTS:WINDOW[:SEED]``, where WINDOW may be 128K, for lengths drawn by ``wlb.documents.synthetic``. It
checks that lengths are whole and positive, and keeps their order. It refuses text, and says how to count its tokens.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store.files import StoreSource, is_url, names_store, source_name, store_prefixes
from wlb.documents.store.index import read_index
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError, require
from wlb.terminal import beginning_of, number_of, tell
from wlb.token_count import MOST_TOKENS, parse_count, parse_tokens

_STDIN = Path("standard input")
_LEAST_WINDOW, _MOST_WINDOW = 4096, 131_072  # of an assumed window

Integers = NDArray[np.integer[Any]]
_NAMES = ("length", "lengths", "tokens", "num_tokens")  # that a column of lengths may have
_LONGEST_CELL = 2**31 - 1  # characters; a text column may exceed csv's own limit of 131,072


def what_was_read(source: str, lengths: NDArray[np.int64], context_window: int | None = None) -> str:
    """One line about ``source``: documents, tokens, typical lengths, and how many documents exceed the window."""
    trained = np.sort(lengths[lengths > 0])
    empty = f" and {len(lengths) - len(trained):,} empty" if len(trained) < len(lengths) else ""
    said = f"read {source}: {number_of(len(trained), 'document')}{empty}, {number_of(int(trained.sum()), 'token')}"
    if not len(trained):
        return said
    said += f"; median {trained[(len(trained) - 1) // 2]:,}, longest {trained[-1]:,}"
    said += f"; documents up to {_holding_95_percent(lengths):,} hold 95% of all tokens"
    if context_window is not None:
        over = int((trained > context_window).sum())
        said += f"; {f'{over:,}' if over else 'none'} over the window of {context_window:,}"
    return said


def assumed_window(lengths: NDArray[np.int64]) -> int:
    """The smallest power of two, from 4K to 128K, such that documents up to it hold 95% of all tokens; else 128K."""
    return min(max(_LEAST_WINDOW, 1 << (_holding_95_percent(lengths) - 1).bit_length()), _MOST_WINDOW)


def described_window(window: int, lengths: NDArray[np.int64]) -> str:
    """The message that ``window`` was assumed by ``assumed_window``."""
    share = 100 * int(lengths[lengths <= window].sum()) // max(1, int(lengths.sum()))
    longest = "the longest default; " if share < 95 else ""
    return f"--context-window {window} ({longest}documents up to it hold {share}% of all tokens)"


def _holding_95_percent(lengths: NDArray[np.int64]) -> int:
    """The least length such that documents up to it hold 95% of all tokens."""
    ascending = np.sort(lengths)
    tokens = np.cumsum(ascending)
    return int(ascending[np.searchsorted(100 * tokens, 95 * tokens[-1])])


def read_lengths(source: StoreSource, *, keep_empty: bool = False) -> NDArray[np.int64]:
    """Tokens of every document of ``source``, in order; shape (documents,).

    Only a store may have empty documents. They are left out, with a note on stderr, unless ``keep_empty`` is set: a
    job's document order counts them.

    Raises ``UserError`` if there are no lengths, or if one is not a whole number from 1 to 2**31 - 1.
    """
    if str(source).startswith("synthetic:"):
        return _synthetic(str(source))
    path = _STDIN if source == "-" else Path(source_name(source))
    read, where = (_from_txt, "line") if path == _STDIN else _READERS.get(path.suffix.lower(), (None, ""))
    is_missing = path != _STDIN and not os.path.exists(path)
    if read is None or is_url(source_name(source)) or (is_missing and names_store(source)):
        return _from_store(source, keep_empty)
    try:
        lengths = read(path)
    except FileNotFoundError:
        raise UserError(f"lengths {path} does not exist; name a file of lengths or a token store") from None
    except OSError as error:
        raise UserError(f"lengths {path} cannot be read: {error.strerror or error}") from error
    if not len(lengths):
        raise UserError(f"{path} holds no document lengths")
    bad = np.flatnonzero((lengths < 1) | (lengths > MOST_TOKENS))
    if bad.size:
        # Lines are counted from 1, entries of arrays and rows from 0.
        raise UserError(
            f"{path}: {where} {int(bad[0]) + (where == 'line')} is {lengths[bad[0]]}; a document has 1 to "
            f"{MOST_TOKENS} tokens"
        )
    return lengths.astype(np.int64)


def _if_text(path: Path) -> str:
    """The end of a message: what to do if ``path`` holds text."""
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
    """Lengths from JSON values: a number is a length, a list of token ids has one."""
    where = "line" if path.suffix == ".jsonl" else "entry"
    numbered = []
    for number, said in enumerate(_json_rows(path), int(where == "line")):
        if isinstance(said, dict):
            if not {"length", "input_ids"} & said.keys():
                found = beginning_of(said) + _if_text(path)
                raise UserError(f"{path}: {where} {number} has neither length nor input_ids, but {found}")
            said = said["length"] if "length" in said else said["input_ids"]
        numbered.append((number, len(said) if isinstance(said, list) else said))
    return _integers(path, where, numbered)


def _json_rows(path: Path) -> list[Any]:
    """The entries of a JSON list, or the value on each line of a .jsonl file."""
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
    return _integers(path, "line", ((number, _parsed(line)) for number, line in enumerate(lines, 1)))


def _from_csv(path: Path) -> Integers:
    """The column ``length``, or the first other one of ``_NAMES``."""
    csv.field_size_limit(_LONGEST_CELL)
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        # Strict, because an unclosed quote would turn the rest of the file into one cell.
        rows = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            heading = [name.strip() for name in next(rows, [_NAMES[0]])]
            column = next((heading.index(name) for name in _NAMES if name in heading), None)
            if column is None:
                found = beginning_of(heading) or "a blank first line"
                raise UserError(
                    f"{path} has no column 'length', but {found}; give the column of lengths that name{_if_text(path)}"
                )
            cells = ((rows.line_num, "".join(row[column : column + 1])) for row in rows if row)
            return _integers(path, "line", ((line, _parsed(cell)) for line, cell in cells))
        except csv.Error as error:
            raise UserError(f"{path} is not a CSV file: line {rows.line_num}: {error}") from None


def _parsed(text: str) -> int | str:
    """``text`` as a whole number, or else unchanged."""
    count = parse_count(text.strip())
    return text.strip() if count is None else count


def _integers(path: Path, where: str, numbered: Iterable[tuple[int, Any]]) -> Integers:
    """Check that all values are whole numbers; each comes with its place in the file."""
    values = []
    for place, value in numbered:
        # bool is a subclass of int, but not a length.
        if type(value) is not int or abs(value) > np.iinfo(np.int64).max:
            advice = _if_text(path) if isinstance(value, str) and any(map(str.isalpha, value)) else ""
            raise UserError(f"{path}: {where} {place} is {str(value)[:40]!r}; a whole number is needed{advice}")
        values.append(value)
    return np.array(values, np.int64)


def _from_npy(path: Path) -> Integers:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError):  # NumPy's own message suggests loading pickles, which would run code
        array = None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        is_array = isinstance(array, np.ndarray)
        found = f"{array.dtype} values in shape {array.shape}" if is_array else "no NumPy array of numbers"
        raise UserError(f"{path} holds {found}; write whole numbers in one dimension with numpy.save")
    return array


def _from_parquet(path: Path, name: str = "length") -> Integers:
    arrow, parquet = require("pyarrow", "data"), require("pyarrow.parquet", "data")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if name not in names:
                raise UserError(f"{path} has no column {name!r}; it has {beginning_of(names)}{_if_text(path)}")
            column = file.read([name])[name]
    except arrow.ArrowException as error:
        raise UserError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    if column.null_count or not arrow.types.is_integer(column.type):
        found = f"{column.type} values" + (f", {column.null_count} of them null" if column.null_count else "")
        raise UserError(f"column {name!r} of {path} holds {found}; whole numbers are needed")
    lengths: Integers = column.to_numpy()
    return lengths


def _from_store(source: StoreSource, keep_empty: bool) -> NDArray[np.int64]:
    """The document lengths of a store, whose token files may be missing."""
    path = Path(source_name(source))
    try:
        prefixes = store_prefixes(source)
    except UserError as error:
        raise UserError(f"{error}{_if_text(path)}") if path.is_dir() else error from None
    if os.path.isfile(path) and not os.path.exists(f"{prefixes[0]}.idx"):
        kinds = f"lengths come from {', '.join(_READERS)}, .idx or a token store prefix"
        raise UserError(f"{path} is of an unknown kind; {kinds}{_if_text(path)}")
    if len(prefixes) == 1 and not is_url(prefixes[0]) and path.suffix != ".idx":
        try:
            os.stat(f"{prefixes[0]}.idx")
        except OSError as error:  # for other errors, reading gives the reason
            if isinstance(error, FileNotFoundError):
                raise UserError(
                    f"neither {path} nor a token store {prefixes[0]}.idx exists; name a file of lengths, or make a "
                    f"store with: wlb prepare SOURCE --out {prefixes[0]}"
                ) from None
    lengths = np.concatenate([read_index(f"{prefix}.idx").lengths() for prefix in prefixes])
    if not lengths.any():
        raise UserError(f"{path} holds no document with tokens")
    if keep_empty or lengths.all():
        return lengths
    tell(f"wlb: note: {path}: {number_of(int((lengths == 0).sum()), 'empty document')} left out")
    return lengths[lengths > 0]


def _synthetic(source: str) -> NDArray[np.int64]:
    parts = re.fullmatch(r"synthetic:([0-9]{1,20}):([^:]*)(?::([0-9]{1,20}))?", source)
    if parts is None:
        raise UserError(
            f"{source!r} is not of the form synthetic:DOCUMENTS:WINDOW[:SEED], in whole numbers; "
            "write it as synthetic:20000:128K:0"
        )
    return sample_lengths(int(parts[1]), parse_tokens(parts[2]), int(parts[3] or 0))


# The reader for each kind of file, and what messages call the place of a length in it.
_READERS: dict[str, tuple[Callable[[Path], Integers], str]] = {
    ".json": (_from_json, "entry"),
    ".txt": (_from_txt, "line"),
    ".npy": (_from_npy, "entry"),
    ".csv": (_from_csv, "line"),
    ".tsv": (_from_csv, "line"),
    ".jsonl": (_from_json, "line"),
    ".parquet": (_from_parquet, "row"),
}
