"""Where raw documents come from: files and directories, or the standard library.

A corpus is walked twice. Making it is the survey: every path is checked and its bytes counted, so that mistakes show
before any work is done. ``batches`` then reads it as a stream, always in the same order (arguments as given,
directories sorted by name), holding one batch at a time.
"""

from __future__ import annotations

import ast
import io
import os
import platform
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

from wlb.documents.prepare.batches import Batch
from wlb.documents.prepare.chat import json_line_chat
from wlb.documents.prepare.raw_files import (
    Item,
    file_kind,
    format_suffix,
    json_line_text,
    json_lines,
    parquet_cells,
    read_text,
    utf8_text,
)
from wlb.errors import UserError, require

DocumentUnit = Literal["definition", "module"]

# Enough that sending a batch to another process costs little beside tokenising it; a few are in memory at a time.
_BATCH_BYTES = 1 << 20
_BATCH_ITEMS = 4096
# What directories are searched for. A file that is named itself is read as text whatever its name.
_PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc")
_CODE = (
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".cs", ".java", ".kt", ".scala", ".js", ".ts"),
    *(".go", ".rs", ".rb", ".sh", ".sql", ".jl", ".r", ".swift", ".lua", ".pl", ".php", ".hs", ".ml"),
)
# What of the standard library is no part of the corpus.
_SKIPPED_DIRECTORIES = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
_BUILD_PREFIXES = ("config-", "_sysconfigdata_", "lib-dynload")  # they hold paths of the machine that built this Python
_TOPICS = Path("pydoc_data", "topics.py")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class StdlibCorpus:
    """The source code and prose of the running Python's own standard library: a corpus that is always there.

    It needs no network, has documents of very different lengths (a few bytes to hundreds of kilobytes), and is the same
    on every machine with the same Python release. Source files are cut into one document per top-level definition, or
    stay whole; text files and the reference articles behind ``help()`` (``pydoc_data.topics``) are prose. Tests,
    installed packages and what the build machine left behind are not part of it.
    """

    def __init__(self, unit: DocumentUnit = "definition") -> None:
        self._unit = unit
        self._root = stdlib_root()
        self.total_bytes = sum(path.stat().st_size for path in stdlib_files(self._root))
        self.skipped_files = 0
        self.description = {"kind": "stdlib", "python": platform.python_version(), "unit": unit}

    def batches(self) -> Iterator[Batch]:
        """All documents, in an order that does not change, in batches of about a megabyte."""
        return _batches(_sized(stdlib_files(self._root)), partial(stdlib_documents, unit=self._unit))


class FileCorpus:
    """Text files, JSON Lines and Parquet, named one by one or found in directories; with ``chat``, conversations.

    Conversations are read from JSON Lines. Raises ``UserError`` when a source does not exist or cannot be read, and
    when nothing is found.
    """

    def __init__(self, sources: Sequence[Path], text_field: str = "text", *, chat: bool = False) -> None:
        self._sources = sources
        self._field = text_field
        self._read_line = json_line_chat if chat else json_line_text
        self.total_bytes = self.skipped_files = 0
        files = 0
        for path in self.files(count_skipped=True):
            files += 1
            self.total_bytes += path.stat().st_size
            if chat and file_kind(path) != "jsonl":
                raise UserError(f"--chat reads conversations from JSON Lines, and {path} is none; leave it out")
            if file_kind(path) == "parquet":
                require("pyarrow", "data")
        if not files:
            raise UserError(f"no text, JSON Lines or Parquet files in {', '.join(map(str, sources))}")
        self.description = {"kind": "files", "files": files, "text_field": text_field}

    def files(self, count_skipped: bool = False) -> Iterator[Path]:
        """All files that are read, in order."""
        for source in self._sources:
            try:
                if source.is_dir():
                    yield from self._directory(source, count_skipped)
                else:
                    source.stat()
                    yield source
            except FileNotFoundError:
                raise UserError(f"source {source} does not exist") from None
            except OSError as error:
                raise UserError(f"source {source} cannot be read: {error.strerror}") from error

    def _directory(self, directory: Path, count_skipped: bool) -> Iterator[Path]:
        with os.scandir(directory) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for entry in ordered:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from self._directory(path, count_skipped)
            elif entry.is_file() and not entry.name.startswith(".") and _is_searched_for(path):
                yield path
            else:
                self.skipped_files += count_skipped

    def batches(self) -> Iterator[Batch]:
        """All documents, in an order that does not change, in batches of about a megabyte."""
        for kind, paths in groupby(self.files(), file_kind):
            if kind == "text":
                yield from _batches(_sized(paths), read_text)
                continue
            for path in paths:
                if kind == "jsonl":
                    yield from _batches(json_lines(path), partial(self._read_line, field=self._field))
                else:
                    yield from _batches(parquet_cells(path, self._field), utf8_text)


Corpus: TypeAlias = StdlibCorpus | FileCorpus


def _is_searched_for(path: Path) -> bool:
    # A plain .json among other files is more often a configuration than a corpus; name it to have it read.
    return path.suffix.lower() != ".json" and (file_kind(path) != "text" or format_suffix(path) in _PROSE + _CODE)


def stdlib_root() -> Path:
    """The directory of the running Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    if not (root / "ast.py").is_file():
        raise UserError(f"this Python has no source of its standard library in {root}; name files instead of --stdlib")
    return root


def stdlib_files(root: Path) -> Iterator[Path]:
    """Python and text files below ``root``, in the same order on every machine."""
    for path in sorted(root.iterdir(), key=lambda path: path.name):
        if path.name.startswith(_BUILD_PREFIXES):
            continue
        if path.is_dir():
            if path.name not in _SKIPPED_DIRECTORIES:
                yield from stdlib_files(path)
        elif path.suffix in (".py", ".txt"):
            yield path


def stdlib_documents(path: Path, unit: DocumentUnit) -> list[str]:
    """The documents of one file of the standard library."""
    source = _read_source(path)
    if path.suffix != ".py" or unit == "module" or not source:
        return [source]
    tree = ast.parse(source)
    if path.parts[-2:] == _TOPICS.parts:
        return _prose(tree)
    return _definitions(source, tree)


def _read_source(path: Path) -> str:
    content = path.read_bytes()
    encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0] if path.suffix == ".py" else "utf-8"
    return content.decode(encoding)


def _prose(tree: ast.Module) -> list[str]:
    """The texts of the one dictionary that ``pydoc_data.topics`` consists of."""
    (assignment,) = (node for node in tree.body if isinstance(node, ast.Assign))
    return list(ast.literal_eval(assignment.value).values())


def _definitions(source: str, tree: ast.Module) -> list[str]:
    """Cut a module into its top-level definitions and the runs of statements between them.

    The pieces joined are the module. Comments and blank lines belong to what follows them, at the end to what
    precedes them.
    """
    cuts = [0]
    previous: ast.stmt | None = None
    for node in tree.body:
        if previous is not None and (isinstance(node, _DEFINITIONS) or isinstance(previous, _DEFINITIONS)):
            cuts.append(previous.end_lineno or 0)
        previous = node
    # Only "\n" ends a line for ast; str.splitlines would also cut at form feeds.
    lines = source.split("\n")
    lines = [line + "\n" for line in lines[:-1]] + lines[-1:]
    return ["".join(lines[first:end]) for first, end in pairwise([*cuts, len(lines)])]


def _sized(paths: Iterable[Path]) -> Iterator[Item]:
    for path in paths:
        size = path.stat().st_size
        yield Item(path, size, size)


def _batches(items: Iterable[Item], texts: Callable[[Any], Iterable[Any]]) -> Iterator[Batch]:
    batch: list[Any] = []
    size = progress = 0
    for item in items:
        batch.append(item.content)
        size += item.size
        progress += item.progress
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_ITEMS:
            yield Batch(batch, texts, progress)
            batch, size, progress = [], 0, 0
    if batch:
        yield Batch(batch, texts, progress)
