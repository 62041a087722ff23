"""Where raw documents come from: files and directories, or the standard library.

Making a corpus is the survey: every path is checked, so that mistakes show before any work is done. ``tasks`` then
divides it, always in the same order (arguments as given, directories sorted by name) and, for the same files, in the
same way; each task is read as a stream, holding one batch at a time.
"""

from __future__ import annotations

import ast
import io
import platform
import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby, pairwise, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from wlb.documents.prepare.batches import Batch, Reject
from wlb.documents.prepare.chat import as_messages
from wlb.documents.prepare.raw_files import (
    COMPRESSED,
    as_text,
    choose_field,
    file_kind,
    format_suffix,
    has_lines,
    json_line,
    line_text,
    read_lines,
    read_parquet,
    read_text,
    refuse_list,
)
from wlb.errors import UserError, require
from wlb.terminal import beginning_of

TextDocuments = Literal["files", "lines"]

# Enough that sending a batch to another process costs little beside tokenising it; a few are in memory at a time.
_BATCH_CHARACTERS = 1 << 20
_BATCH_ITEMS = 4096
# Of a task: the least costs little beside tokenising it, the most is a minute or so of work to lose.
_TASK_BYTES = (1 << 20, 256 << 20)
_TASKS = 8192  # in a corpus between those limits
# What directories are searched for. A file that is named itself is read as text whatever its name.
_TEXT = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".cs", ".java", ".kt", ".scala", ".js", ".ts"),
    *(".go", ".rs", ".rb", ".sh", ".sql", ".jl", ".r", ".swift", ".lua", ".pl", ".php", ".hs", ".ml"),
)
_UNITS = {"text": "file", "lines": "line", "jsonl": "line", "parquet": "row"}
# What of the standard library is no part of the corpus.
_SKIPPED_DIRECTORIES = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
_BUILD_PREFIXES = ("config-", "_sysconfigdata_", "lib-dynload")  # they hold paths of the machine that built this Python
_TOPICS = Path("pydoc_data", "topics.py")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

# A part of a corpus that is read on its own, some whole files or a range of one: its documents.
CorpusTask: TypeAlias = Callable[[], Iterator[Any]]


class CorpusShard(NamedTuple):
    """The ``number``-th of ``of`` shares of a corpus, from 1; in their order they have its documents in order."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def prefix(self, prefix: Path) -> Path:
        """``PREFIX-I-of-N``, the store of this share."""
        return prefix.with_name(f"{prefix.name}-{self.number}-of-{self.of}")

    @classmethod
    def parse(cls, text: str) -> CorpusShard:
        """Of ``I/N``. Raises ``UserError`` for anything else."""
        match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--shard {text} is not I/N with I from 1 to N, such as 3/100")
        return cls(int(match[1]), int(match[2]))


class Corpus:
    """The documents of ``files``, each with how it is read; always in the same order, and divided in the same way.

    ``name`` says what is one document. A text, or a list of messages with ``chat``, stands in the field ``text_field``
    of JSON and Parquet.
    """

    def __init__(
        self, name: str, files: list[tuple[Path, str]], description: dict[str, Any], text_field: str, chat: bool = False
    ) -> None:
        self.name, self.files, self.description = name, files, description
        self.total_bytes = sum(path.stat().st_size for path, _ in files)
        self.skipped_files = 0
        self._field, self._chat = text_field, chat
        self._other_fields: list[str] = []  # of the first entry without the field

    def batches(self, shard: CorpusShard | None = None) -> Iterator[Batch]:
        """All documents in order, or those of ``shard``, in batches of about a megabyte.

        Raises ``UserError`` where there are more shards than tasks.
        """
        if shard is None:
            return chain.from_iterable(map(_batches, self.tasks()))
        tasks = [*self.tasks()]
        if shard.of > len(tasks):
            raise UserError(f"{self.name} divides into {len(tasks)} shards at most, and shard {shard} is asked for")
        first, stop = (len(tasks) * number // shard.of for number in (shard.number - 1, shard.number))
        return chain.from_iterable(map(_batches, tasks[first:stop]))

    def tasks(self) -> Iterator[CorpusTask]:
        """Tasks that have all documents between them, in order."""
        least, most = _TASK_BYTES
        most = min(most, max(least, self.total_bytes // _TASKS))
        for kind, of_kind in groupby(self.files, itemgetter(1)):
            paths = [path for path, _ in of_kind]
            if kind in _WHOLE_READERS:
                yield from _of_whole_files(paths, most, _WHOLE_READERS[kind])
            else:
                yield from chain.from_iterable(self._of_one_file(path, kind, most) for path in paths)

    def described_fields(self) -> str:
        """Which field was looked for in JSON, and which ones the first entry without it has that was read."""
        names = beginning_of(self._other_fields) or "none"
        return f"the first entry without field {self._field!r} has {names}; {choose_field(self._other_fields)}"

    def _of_one_file(self, path: Path, kind: str, most: int) -> Iterator[CorpusTask]:
        size = path.stat().st_size
        shares = 1 if path.suffix.lower() in COMPRESSED else -(-size // most) or 1
        cuts = [size * share // shares for share in range(shares)]
        document = line_text if kind == "lines" else partial(json_line, document=self._document)
        for share, (start, end) in enumerate(zip_longest(cuts, cuts[1:])):  # the last has no end: a pipe has no size
            if kind == "parquet":
                yield partial(read_parquet, path, self._field, share, shares, self._document if self._chat else None)
            else:
                yield partial(read_lines, path, start, end, document)

    def _document(self, entry: Any) -> Any:
        """What a JSON object has in the field, or a JSON string itself, where it is a document."""
        if isinstance(entry, dict):
            if self._field not in entry:
                self._other_fields = self._other_fields or [*entry]
                return Reject.NO_FIELD
            entry = entry[self._field]
        elif not isinstance(entry, str):
            return Reject.NO_FIELD
        return as_messages(entry) if self._chat else as_text(entry)


class StdlibCorpus(Corpus):
    """The source code and prose of the running Python's own standard library: a corpus that is always there.

    It has documents of a few bytes to hundreds of kilobytes, the same on every machine with the same Python release:
    one per top-level definition of its source, text files, and the articles behind ``help()`` (``pydoc_data.topics``).
    """

    def __init__(self) -> None:
        files = [(path, "stdlib") for path in stdlib_files(stdlib_root())]
        description = {"kind": "stdlib", "python": platform.python_version()}
        super().__init__("the standard library (one document per definition)", files, description, "text")


class FileCorpus(Corpus):
    """Text files, JSON Lines and Parquet, named one by one or found in directories; with ``chat``, conversations.

    ``documents`` says whether a text file is a document or each of its lines is. Left out, it is the file where it lies
    in a directory, is code or has markup. Raises ``UserError`` where that does not tell, when a source does not exist
    or cannot be read, and when nothing is found. Conversations are read from JSON Lines and Parquet.
    """

    def __init__(
        self,
        sources: Sequence[Path],
        text_field: str = "text",
        *,
        chat: bool = False,
        documents: TextDocuments | None = None,
    ) -> None:
        found = [*chain.from_iterable(map(_found, sources))]
        files = [(path, _kind(path, documents, chat)) for path in found if path is not None]
        named = f"{sources[0]} and {len(sources) - 1} more" if len(sources) > 1 else str(sources[0])
        if not files:
            raise UserError(f"no text, JSON Lines or Parquet files in {named}")
        for source in sources if documents is None else ():
            is_known = source.is_dir() or format_suffix(source) in _TEXT[2:]
            if not is_known and file_kind(source) == "text" and has_lines(source):
                raise UserError(
                    f"{source} has several lines; give --documents lines if each is a document, or --documents files "
                    "if they are one together"
                )
        units = " or ".join(dict.fromkeys(_UNITS[kind] for _, kind in files))
        description = {"kind": "files", "files": len(files), "text_field": text_field, "documents": documents}
        super().__init__(f"{named} (one document per {units})", files, description, text_field, chat)
        self.skipped_files = len(found) - len(files)


def _found(source: Path) -> Iterator[Path | None]:
    """The files of a source, in order; None for each in a directory that is not read."""
    try:
        if not source.is_dir():
            source.stat()
            yield source
            return
        for path in sorted(source.iterdir()):
            is_hidden = path.name.startswith(".")
            if path.is_dir() and not path.is_symlink() and not is_hidden:
                yield from _found(path)
            else:
                yield path if path.is_file() and not is_hidden and _is_searched_for(path) else None
    except FileNotFoundError:
        raise UserError(f"source {source} does not exist") from None
    except OSError as error:
        raise UserError(f"source {source} cannot be read: {error.strerror}") from error


def _kind(path: Path, documents: TextDocuments | None, chat: bool) -> str:
    """How a file is read. Raises ``UserError`` where it cannot be."""
    kind, suffix = file_kind(path), format_suffix(path)
    if suffix == ".json":
        refuse_list(path)
    if suffix in (".csv", ".tsv"):
        raise UserError(f"{path} is a table; save it as Parquet or JSON Lines, with the text in a column")
    if chat and kind == "text":
        raise UserError(f"--chat reads conversations from JSON Lines and Parquet, and {path} is neither; leave it out")
    if kind == "parquet":
        require("pyarrow", "data")
    return "lines" if kind == "text" and documents == "lines" else kind


def _is_searched_for(path: Path) -> bool:
    # A plain .json among other files is more often a configuration than a corpus; name it to have it read.
    return path.suffix.lower() != ".json" and (file_kind(path) != "text" or format_suffix(path) in _TEXT)


def stdlib_root() -> Path:
    """The directory of the running Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    if not (root / "ast.py").is_file():
        raise UserError(f"this Python has no source of its standard library in {root}; name files instead of --stdlib")
    return root


def stdlib_files(root: Path) -> Iterator[Path]:
    """Python and text files below ``root``, in the same order on every machine."""
    for path in sorted(root.iterdir()):
        if path.name in _SKIPPED_DIRECTORIES or path.name.startswith(_BUILD_PREFIXES):
            continue
        if path.is_dir():
            yield from stdlib_files(path)
        elif path.suffix in (".py", ".txt"):
            yield path


def stdlib_documents(path: Path) -> list[str]:
    """The documents of one file of the standard library."""
    content = path.read_bytes()
    if path.suffix != ".py" or not content:
        return [content.decode()]
    source = content.decode(tokenize.detect_encoding(io.BytesIO(content).readline)[0])
    tree = ast.parse(source)
    if path.parts[-2:] != _TOPICS.parts:
        return _definitions(source, tree)
    (assignment,) = (node for node in tree.body if isinstance(node, ast.Assign))  # one dictionary of texts
    return list(ast.literal_eval(assignment.value).values())


def _definitions(source: str, tree: ast.Module) -> list[str]:
    """Cut a module into its top-level definitions and the runs of statements between them.

    The pieces joined are the module. Comments and blank lines belong to what follows them.
    """
    cuts = [0]
    for previous, node in pairwise(tree.body):
        if isinstance(node, _DEFINITIONS) or isinstance(previous, _DEFINITIONS):
            cuts.append(previous.end_lineno or 0)
    lines = re.findall(r".*\n|.+$", source)  # str.splitlines would also cut at form feeds, which end no line for ast
    return ["".join(lines[first:end]) for first, end in pairwise([*cuts, len(lines)])]


# Of kinds of files that are one document, or cut by what they say.
_WHOLE_READERS: dict[str, Callable[[Path], Iterable[Any]]] = {
    "text": lambda path: [read_text(path)],
    "stdlib": lambda path: map(as_text, stdlib_documents(path)),
}


def _of_whole_files(paths: Sequence[Path], most: int, read: Callable[[Path], Iterable[Any]]) -> Iterator[CorpusTask]:
    """Tasks of consecutive files, of ``most`` bytes or somewhat more each; ``read`` gives the documents of one."""
    first = size = 0
    for stop, path in enumerate(paths, 1):
        size += path.stat().st_size
        if size >= most or stop == len(paths):
            yield partial(_read_files, paths[first:stop], read)
            first, size = stop, 0


def _read_files(paths: Iterable[Path], read: Callable[[Path], Iterable[Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(read, paths))


def _batches(task: CorpusTask) -> Iterator[Batch]:
    """Its documents in order, in batches of about a megabyte."""
    batch: Batch = []
    size = 0
    for document in task():
        batch.append(document)
        size += sum(len(message["content"]) for message in document) if isinstance(document, list) else len(document)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_ITEMS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
