"""Where raw documents come from: files and directories, or the standard library.

A corpus is walked twice. Making it is the survey: every path is checked and its bytes counted, so that mistakes show
before any work is done. ``tasks`` then divides it, always in the same order (arguments as given, directories sorted by
name) and, for the same files, in the same way; each task is read as a stream, holding one batch at a time.
"""

from __future__ import annotations

import ast
import io
import os
import platform
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any, Literal

from wlb.documents.prepare.batches import Batch
from wlb.documents.prepare.chat import as_messages
from wlb.documents.prepare.raw_files import (
    Item,
    as_text,
    choose_field,
    csv_cells,
    entry_document,
    fields_of,
    file_kind,
    file_lines,
    format_suffix,
    has_lines,
    is_compressed,
    json_entries,
    line_document,
    line_text,
    parquet_cells,
    read_text,
    utf8_text,
)
from wlb.errors import UserError, require
from wlb.terminal import beginning_of

DocumentUnit = Literal["definition", "module"]
TextDocuments = Literal["files", "lines"]

# Enough that sending a batch to another process costs little beside tokenising it; a few are in memory at a time.
_BATCH_BYTES = 1 << 20
_BATCH_ITEMS = 4096
# Of a task: the least costs little beside tokenising it, the most is a minute or so of work to lose.
_TASK_BYTES = (_BATCH_BYTES, 256 << 20)
_TASKS = 8192  # in a corpus between those limits
# What directories are searched for. A file that is named itself is read as text whatever its name.
_PLAIN = (".txt", ".text")  # whose lines may be documents
_WHOLE = (
    *(".md", ".markdown", ".rst", ".tex", ".org", ".adoc"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".cs", ".java", ".kt", ".scala", ".js", ".ts"),
    *(".go", ".rs", ".rb", ".sh", ".sql", ".jl", ".r", ".swift", ".lua", ".pl", ".php", ".hs", ".ml"),
)
_UNITS = {"text": "file", "lines": "line", "jsonl": "line", "json": "entry", "csv": "row", "parquet": "row"}
# What of the standard library is no part of the corpus.
_SKIPPED_DIRECTORIES = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
_BUILD_PREFIXES = ("config-", "_sysconfigdata_", "lib-dynload")  # they hold paths of the machine that built this Python
_TOPICS = Path("pydoc_data", "topics.py")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class CorpusTask:
    """A part of a corpus that is read on its own: some whole files, or a range of one.

    ``items`` gives its raw items, and ``texts`` the documents of one.
    """

    items: Callable[[], Iterator[Item]]
    texts: Callable[[Any], Iterable[Any]]

    def batches(self) -> Iterator[Batch]:
        """Its documents in order, in batches of about a megabyte."""
        batch: list[Any] = []
        size = progress = 0
        for item in self.items():
            batch.append(item.content)
            size += item.size
            progress += item.progress
            if size >= _BATCH_BYTES or len(batch) >= _BATCH_ITEMS:
                yield Batch(batch, self.texts, progress)
                batch, size, progress = [], 0, 0
        if batch:
            yield Batch(batch, self.texts, progress)


@dataclass(frozen=True, slots=True)
class CorpusShard:
    """The ``index``-th of ``count`` shares of a corpus, from 1; in their order they have its documents in order."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def prefix(self, prefix: Path) -> Path:
        """``PREFIX-I-of-N``, the store of this share."""
        return prefix.with_name(f"{prefix.name}-{self.index}-of-{self.count}")

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str] = os.environ) -> CorpusShard:
        """``I/N``, or ``slurm`` for the element of a job array that this process is. Raises ``UserError``."""
        if text == "slurm":
            return cls._of_slurm(environment)
        match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--shard {text} is neither slurm nor I/N with I from 1 to N, such as 3/100")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def _of_slurm(cls, environment: Mapping[str, str]) -> CorpusShard:
        names = ("ID", "COUNT", "MIN", "MAX", "STEP")
        try:
            this, count, least, most, step = (int(environment[f"SLURM_ARRAY_TASK_{name}"]) for name in names)
            tasks = range(least, most + 1, step)
        except (KeyError, ValueError):
            raise UserError("--shard slurm needs a SLURM job array (sbatch --array); give --shard I/N") from None
        if len(tasks) != count or this not in tasks or tasks[-1] != most:
            raise UserError(
                f"--shard slurm cannot number {count} tasks from {least} to {most}, of which this is {this}; give an "
                "array A-B, or --shard I/N"
            )
        return cls(tasks.index(this) + 1, count)


class Corpus:
    """Documents that are always read in the same order; ``tasks`` divides them, in the same way every time."""

    name: str  # and what is one document
    total_bytes: int
    skipped_files: int
    description: dict[str, Any]

    def tasks(self) -> Iterator[CorpusTask]:
        """Tasks that have all documents between them, in order."""
        raise NotImplementedError

    def described_fields(self) -> str:
        """Which field was looked for in JSON, and which ones the first entry without it has."""
        raise NotImplementedError

    def batches(self, shard: CorpusShard | None = None) -> Iterator[Batch]:
        """All documents in order, or those of ``shard``, in batches of about a megabyte.

        Raises ``UserError`` where there are more shards than tasks.
        """
        if shard is None:
            return chain.from_iterable(task.batches() for task in self.tasks())
        tasks = [*self.tasks()]
        if shard.count > len(tasks):
            raise UserError(f"{self.name} divides into {len(tasks)} shards at most, and shard {shard} is asked for")
        first, stop = (len(tasks) * number // shard.count for number in (shard.index - 1, shard.index))
        return chain.from_iterable(task.batches() for task in tasks[first:stop])


class StdlibCorpus(Corpus):
    """The source code and prose of the running Python's own standard library: a corpus that is always there.

    It needs no network, has documents of very different lengths (a few bytes to hundreds of kilobytes), and is the same
    on every machine with the same Python release. Source files are cut into one document per top-level definition, or
    stay whole; text files and the reference articles behind ``help()`` (``pydoc_data.topics``) are prose. Tests,
    installed packages and what the build machine left behind are not part of it.
    """

    def __init__(self, unit: DocumentUnit = "definition") -> None:
        self._unit = unit
        self._root = stdlib_root()
        self.name = f"the standard library (one document per {unit})"
        self.total_bytes = sum(path.stat().st_size for path in stdlib_files(self._root))
        self.skipped_files = 0
        self.description = {"kind": "stdlib", "python": platform.python_version(), "unit": unit}

    def tasks(self) -> Iterator[CorpusTask]:
        texts = partial(stdlib_documents, unit=self._unit)
        return _of_whole_files(stdlib_files(self._root), _task_bytes(self.total_bytes), texts)


class FileCorpus(Corpus):
    """Text files, JSON, CSV and Parquet, named one by one or found in directories; with ``chat``, conversations.

    ``documents`` says whether a text file is a document or each of its lines is. Left out, it is the file where it lies
    in a directory, is code or has markup. Raises ``UserError`` where that does not tell, when a source does not exist
    or cannot be read, and when nothing is found. Conversations are read from JSON and Parquet.
    """

    def __init__(
        self,
        sources: Sequence[Path],
        text_field: str = "text",
        *,
        chat: bool = False,
        documents: TextDocuments | None = None,
    ) -> None:
        self._sources, self._documents = sources, documents
        self._field, self._chat = text_field, chat
        self.total_bytes = self.skipped_files = 0
        kinds = Counter[str]()
        for path in self.files(count_skipped=True):
            self.total_bytes += path.stat().st_size
            kinds[kind := self._kind(path)] += 1
            if chat and kind in ("text", "lines", "csv"):
                raise UserError(
                    f"--chat reads conversations from JSON and Parquet, and {path} is neither; leave it out"
                )
            if kind == "parquet":
                require("pyarrow", "data")
            if kind == "csv" and path.is_file():
                next(csv_cells(path, text_field), None)  # which raises where the column is missing
        named = f"{sources[0]} and {len(sources) - 1} more" if len(sources) > 1 else str(sources[0])
        if not kinds:
            raise UserError(f"no text, JSON Lines, CSV or Parquet files in {named}")
        self._check_documents(named, kinds)
        units = " or ".join(dict.fromkeys(_UNITS[kind] for kind in kinds))
        self.name = f"{named} (one document per {units})"
        self.description = {"kind": "files", "files": kinds.total(), "text_field": text_field, "documents": documents}

    def _check_documents(self, named: str, kinds: Collection[str]) -> None:
        """Raise ``UserError`` where ``documents`` is missing or has no effect."""
        if self._documents is not None and not {"text", "lines"} & {*kinds}:
            raise UserError(f"--documents is for text files, and {named} has none; leave it out")
        for source in self._sources:
            is_known = self._documents is not None or source.is_dir() or format_suffix(source) in _WHOLE
            if not is_known and file_kind(source) == "text" and has_lines(source):
                raise UserError(
                    f"{source} has several lines; give --documents lines if each is a document, or --documents files "
                    "if they are one together"
                )

    def _kind(self, path: Path) -> str:
        kind = file_kind(path)
        return "lines" if kind == "text" and self._documents == "lines" else kind

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

    def tasks(self) -> Iterator[CorpusTask]:
        most = _task_bytes(self.total_bytes)
        for kind, paths in groupby(self.files(), self._kind):
            if kind == "text":
                yield from _of_whole_files(paths, most, read_text)
                continue
            for path in paths:
                yield from self._of_one_file(path, kind, most)

    def described_fields(self) -> str:
        found = (fields_of(item) for batch in self.batches() for item in batch.items)
        other = next((fields for fields in found if fields and self._field not in fields), [])
        names = beginning_of(other) or "none"
        return f"the first entry without field {self._field!r} has {names}; {choose_field(other)}"

    def _of_one_file(self, path: Path, kind: str, most: int) -> Iterator[CorpusTask]:
        size = path.stat().st_size
        read_whole = is_compressed(path) or kind in ("json", "csv")
        shares = 1 if read_whole else -(-size // most) or 1
        cuts = [size * share // shares for share in range(shares)]
        for share, (start, end) in enumerate(pairwise([*cuts, size])):
            # The last share has no end: a pipe has no size.
            lines = partial(file_lines, path, start, None if share + 1 == shares else end)
            yield CorpusTask(*self._reader(path, kind, lines, share, shares))

    def _reader(
        self, path: Path, kind: str, lines: Callable[[], Iterator[Item]], share: int, shares: int
    ) -> tuple[Callable[[], Iterator[Item]], Callable[[Any], Iterable[Any]]]:
        """What gives the items of a file, and what the document of one."""
        field, checked = self._field, as_messages if self._chat else as_text
        entry = partial(entry_document, field=field, checked=checked)
        match kind:
            case "lines":
                return lines, line_text
            case "jsonl":
                return lines, partial(line_document, field=field, checked=checked)
            case "json":
                return partial(json_entries, path), entry
            case "csv":
                return partial(csv_cells, path, field), utf8_text
        return partial(parquet_cells, path, field, share, shares, self._chat), entry if self._chat else utf8_text


def _is_searched_for(path: Path) -> bool:
    # A plain .json among other files is more often a configuration than a corpus; name it to have it read.
    return path.suffix.lower() != ".json" and (file_kind(path) != "text" or format_suffix(path) in _PLAIN + _WHOLE)


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


def _task_bytes(corpus_bytes: int) -> int:
    least, most = _TASK_BYTES
    return min(most, max(least, corpus_bytes // _TASKS))


def _of_whole_files(paths: Iterable[Path], most: int, texts: Callable[[Any], Iterable[Any]]) -> Iterator[CorpusTask]:
    """Tasks of consecutive files, of ``most`` bytes or somewhat more each."""
    group: list[Path] = []
    size = 0
    for path in paths:
        group.append(path)
        size += path.stat().st_size
        if size >= most:
            yield CorpusTask(partial(_sized, group), texts)
            group, size = [], 0
    if group:
        yield CorpusTask(partial(_sized, group), texts)


def _sized(paths: Iterable[Path]) -> Iterator[Item]:
    for path in paths:
        size = path.stat().st_size
        yield Item(path, size, size)
