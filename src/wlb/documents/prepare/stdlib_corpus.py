"""The source code and prose of Python's own standard library: a corpus that is always there.

It needs no network, has documents of very different lengths (a few bytes to hundreds of kilobytes), and is the same on
every machine with the same Python release. Source files are cut into one document per top-level definition, or stay
whole; text files and the reference articles behind ``help()`` (``pydoc_data.topics``) are prose. Tests,
installed packages and what the build machine left behind are not part of it.
"""

from __future__ import annotations

import ast
import io
import sysconfig
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Literal

from wlb.errors import UserError

Unit = Literal["definition", "module"]

_SKIPPED_DIRECTORIES = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
# Configuration of the build (config-*, _sysconfigdata_*) holds paths of the machine that built this Python.
_BUILD_PREFIXES = ("config-", "_sysconfigdata_", "lib-dynload")
_TOPICS = Path("pydoc_data", "topics.py")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


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


def stdlib_documents(path: Path, unit: Unit) -> list[str]:
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
