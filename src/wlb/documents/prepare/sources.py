"""Where raw documents come from: files and directories, or the standard library.

Making a corpus checks every path, so that mistakes show before any work is done. Documents always come in the same
order (arguments as given, directories sorted by name), as a stream that holds one batch at a time. A shard of a corpus
is a range of its bytes, with the documents that begin there.
"""

import ast
import io
import math
import platform
import re
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from wlb.documents.prepare import raw_files
from wlb.documents.prepare.chat import as_messages
from wlb.documents.prepare.raw_files import COMPRESSED, Reject, as_text, format_of
from wlb.errors import UserError, require
from wlb.terminal import beginning_of

TextDocuments = Literal["files", "lines"]
# Documents: each a ``str``, a list of messages in a corpus of conversations, or a ``Reject``.
Batch: TypeAlias = list[Any]

# Large enough that tokenising a batch takes far longer than sending it to another process; a few are in memory at once.
_BATCH_CHARACTERS = 1 << 20
_BATCH_ITEMS = 4096
# The formats that are not plain text. The corpora of Megatron and C4 keep JSON Lines under plain .json names.
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
# The text files that are read from directories. A file that is named itself is read whatever its suffix.
_TEXT = (
    *(".txt", ".text"),
    *(".md", ".markdown", ".rst", ".tex", ".org", ".adoc"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".cs", ".java", ".kt", ".scala", ".js", ".ts"),
    *(".go", ".rs", ".rb", ".sh", ".sql", ".jl", ".r", ".swift", ".lua", ".pl", ".php", ".hs", ".ml"),
)
_UNITS = {"text": "file", "lines": "line", "jsonl": "line", "parquet": "row"}
# Parts of the standard library that are not in the corpus.
_SKIPPED_DIRECTORIES = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
_BUILD_PREFIXES = ("config-", "_sysconfigdata_", "lib-dynload")  # they hold paths of the build machine
_TOPICS = Path("pydoc_data", "topics.py")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class CorpusShard(NamedTuple):
    """Shard ``number`` of ``of``, from 1; all shards in order have the documents of the corpus in order."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def prefix(self, prefix: Path) -> Path:
        """``PREFIX-I-of-N``, the store of this shard."""
        return Path(f"{prefix}-{self.number}-of-{self.of}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``I/N``. Raises ``UserError`` for anything else."""
        match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--shard {text} is not I/N with I from 1 to N, such as 3/100")
        return cls(int(match[1]), int(match[2]))


class Corpus:
    """The documents of ``files``, given with the kind of each; always in the same order, with the same shards.

    ``name`` says in messages what one document is. In JSON and Parquet, the field ``text_field`` holds the text, or the
    list of messages with ``chat``.
    """

    def __init__(
        self, name: str, files: list[tuple[Path, str]], description: dict[str, Any], text_field: str, chat: bool = False
    ) -> None:
        self.name, self.files, self.description = name, files, description
        self._sizes = [path.stat().st_size for path, _ in files]
        self.total_bytes = sum(self._sizes)
        self.skipped_files = 0
        self._field, self._chat = text_field, chat
        self._other_fields: list[str] = []  # that the first entry without the field has

    def batches(self, shard: CorpusShard | None = None) -> Iterator[Batch]:
        """All documents in order, or those of ``shard``, in batches of about a megabyte."""
        number, of = shard or (1, 1)
        first, stop = (self.total_bytes * cut // of for cut in (number - 1, number))
        batch: Batch = []
        size = 0
        for document in self._documents(first, stop if number < of else math.inf):
            batch.append(document)
            messages = document if isinstance(document, list) else [{"content": document}]
            size += sum(len(message["content"]) for message in messages)
            if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_ITEMS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def described_fields(self) -> str:
        """The field that was looked for in JSON, and the fields of the first entry without it."""
        names = beginning_of(self._other_fields) or "none"
        remedy = raw_files.choose_field([] if self._chat else self._other_fields)
        return f"the first entry without the field {self._field!r} has: {names}; {remedy}"

    def _documents(self, first: int, stop: float) -> Iterator[Any]:
        """The documents that begin in bytes ``first`` to ``stop`` of all files joined."""
        begins = 0
        for (path, kind), size in zip(self.files, self._sizes, strict=True):
            start, end = max(0, first - begins), stop - begins  # in this file
            if end > 0 and (start < size or start == 0):
                yield from self._read(path, kind, start, end if end < size else math.inf)  # a pipe has no size
            begins += size

    def _read(self, path: Path, kind: str, start: int, end: float) -> Iterator[Any]:
        if kind == "parquet":
            yield from raw_files.read_parquet(path, self._field, start, end, self._document if self._chat else None)
            return
        if kind not in ("lines", "jsonl") or path.suffix.lower() in COMPRESSED:  # these are only read whole
            if start > 0:
                return
            end = math.inf
        if kind == "stdlib":
            yield from map(as_text, stdlib_documents(path))
        elif kind == "text":
            yield raw_files.read_text(path)
        else:
            document = raw_files.line_text if kind == "lines" else partial(raw_files.json_line, document=self._document)
            yield from raw_files.read_lines(path, start, end, document)

    def _document(self, entry: Any) -> Any:
        """The document in the field of a JSON object, or a JSON string itself."""
        if isinstance(entry, dict):
            if self._field not in entry:
                self._other_fields = self._other_fields or [*entry]
                return Reject.NO_FIELD
            entry = entry[self._field]
        return as_messages(entry) if self._chat else as_text(entry)


class StdlibCorpus(Corpus):
    """The source code and prose of the running Python's standard library: a corpus that is always available.

    Documents have a few bytes to hundreds of kilobytes, and are the same on every machine with the same Python release:
    top-level definitions of the source, text files, and the articles behind ``help()`` (``pydoc_data.topics``).
    """

    def __init__(self) -> None:
        files = [(path, "stdlib") for path in stdlib_files(stdlib_root())]
        description = {"kind": "stdlib", "python": platform.python_version()}
        super().__init__("the standard library (one document per definition)", files, description, "text")


class FileCorpus(Corpus):
    """Text files, JSON Lines and Parquet, named one by one or found in directories; with ``chat``, conversations.

    ``documents`` says whether a text file is one document or each of its lines is. By default a file in a directory, of
    code or of markup is one document. Raises ``UserError`` for any other text file of several lines, if a source does
    not exist or cannot be read, and if nothing is found. Conversations come from JSON Lines and Parquet only.
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
            raise UserError(f"{named} holds no text, JSON Lines or Parquet files; name other files or directories")
        for source in filter(needs_documents, sources if documents is None else ()):
            raise UserError(
                f"{source} has several lines; give --documents lines if each is a document, or --documents files "
                "if the file is one"
            )
        units = " or ".join(dict.fromkeys(_UNITS[kind] for _, kind in files))
        description = {"kind": "files", "files": len(files), "text_field": text_field, "documents": documents}
        super().__init__(f"{named} (one document per {units})", files, description, text_field, chat)
        self.skipped_files = len(found) - len(files)


def needs_documents(source: Path) -> bool:
    """Whether ``source`` may be one document or one per line, so that somebody must say which."""
    if source.is_dir() or format_of(source) in (*_KINDS, *_TEXT[2:]):
        return False
    if not source.is_file():  # a pipe, which cannot be read twice
        return True
    with raw_files.opened(source) as file:
        return any(line.strip() for line in islice(file, 1, None))


def _found(source: Path) -> Iterator[Path | None]:
    """The files of a source, in order; None for each file in a directory that is skipped."""
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
                # A plain .json in a directory is more often a configuration than a corpus; name it to have it read.
                is_read = path.suffix.lower() != ".json" and format_of(path) in (*_KINDS, *_TEXT)
                yield path if path.is_file() and not is_hidden and is_read else None
    except FileNotFoundError:
        raise UserError(f"source {source} does not exist; name a file or a directory of text") from None
    except OSError as error:
        raise UserError(f"source {source} cannot be read: {error.strerror}") from error


def _kind(path: Path, documents: TextDocuments | None, chat: bool) -> str:
    """The kind of a file. Raises ``UserError`` if it cannot be read."""
    suffix = format_of(path)
    kind = _KINDS.get(suffix, "text")
    if suffix == ".json":
        with raw_files.opened(path) as file:
            if file.read(1 << 10).decode("utf-8-sig", "replace").lstrip().startswith("["):
                raise UserError(f"{path} is a JSON list; {raw_files.one_per_line(path)}")
    if suffix in (".csv", ".tsv"):
        raise UserError(f"{path} is a table; save it as Parquet or JSON Lines, with the text in a column")
    if chat and kind == "text":
        raise UserError(
            f"--chat reads conversations from JSON Lines and Parquet, and {path} is neither; leave one of them out"
        )
    if kind == "parquet":
        require("pyarrow", "data")
    return "lines" if kind == "text" and documents == "lines" else kind


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

    Joined, the pieces are the module. Comments and blank lines belong to the piece that follows them.
    """
    cuts = [0]
    for previous, node in pairwise(tree.body):
        if isinstance(node, _DEFINITIONS) or isinstance(previous, _DEFINITIONS):
            cuts.append(previous.end_lineno or 0)
    lines = re.findall(r".*\n|.+$", source)  # str.splitlines also cuts at form feeds, which end no line for ast
    return ["".join(lines[first:end]) for first, end in pairwise([*cuts, len(lines)])]
