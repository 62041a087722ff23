"""What names a token store: its prefix, which may be a URL, or a directory, a glob or a list of stores that are one."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Field

from wlb.documents.store.index import index_path
from wlb.documents.store.remote import RemotePath, store_prefix
from wlb.errors import UserError
from wlb.settings import check_path

# A prefix or PREFIX.idx, also at a URL, a directory of stores, a glob of them, or a list of these.
StoreSource: TypeAlias = "str | Path | Sequence[str | Path]"

_StorePath = Annotated[
    Path,
    BeforeValidator(lambda value: store_prefix(value) if isinstance(value, str | Path) else value),
    BeforeValidator(check_path),  # which comes first
]


def _check_kind(source: object) -> object:
    parts = source if isinstance(source, list | tuple) else [source]
    if not parts or not all(isinstance(part, str | Path) for part in parts):
        raise ValueError("must be the path of a token store, or a list of such paths")
    return source


# A setting that names a store.
StoreSetting = Annotated[
    _StorePath | Annotated[tuple[_StorePath, ...], Field(min_length=1)], BeforeValidator(_check_kind)
]


def store_prefixes(source: StoreSource) -> list[Path]:
    """The prefixes of all stores that ``source`` names, sorted by name, in which 10 comes after 9.

    A prefix is returned whether or not there is a store, and nothing is asked of a server. Raises ``UserError`` for a
    directory or a glob without stores, for one that is named twice, and for a URL that is a glob or one of a list.
    """
    parts = source_parts(source)
    prefixes = [prefix for part in parts for prefix in _expanded(part)]
    if len(prefixes) > 1:
        if remote := [prefix for prefix in prefixes if isinstance(prefix, RemotePath)]:
            raise UserError(
                f"{remote[0]} is one of {len(prefixes)} shards, and shards cannot be at URLs; copy them to a disk, or "
                "name each as a store of data.mixture"
            )
        refuse_twice(prefixes)
    return sorted(prefixes, key=lambda prefix: _natural(str(prefix)))


def names_store(source: StoreSource) -> bool:
    """Whether ``source`` names a store that exists."""
    try:
        return all(index_path(prefix).exists() for prefix in store_prefixes(source))
    except UserError:
        return False


def source_parts(source: StoreSource) -> tuple[Path, ...]:
    """``source`` as a list. Raises ``UserError`` as ``store_prefix``."""
    return (store_prefix(source),) if isinstance(source, str | Path) else tuple(map(store_prefix, source))


def source_name(source: StoreSource) -> str:
    """``source`` in messages."""
    first, *others = source_parts(source)
    return f"{first} and {len(others)} more" if others else str(first)


def refuse_twice(prefixes: Sequence[Path]) -> None:
    """Raise ``UserError`` where two of ``prefixes`` are the same store."""
    seen: dict[object, Path] = {}
    for prefix in prefixes:
        index = f"{prefix}.idx"
        try:
            found = os.stat(index)
            key: object = (found.st_dev, found.st_ino)  # also of a link to it, of either kind
        except OSError:
            key = index
        if (first := seen.setdefault(key, prefix)) is not prefix:
            raise UserError(f"a token store is named twice, as {first} and as {prefix}; name it once")


def _expanded(path: Path) -> list[Path]:
    if isinstance(path, RemotePath):
        if set("*?") & set(str(path)):
            raise UserError(f"{path} is a pattern, and stores at URLs cannot be listed; name one store")
        return [_without_ending(path)]
    if path.name and index_path(path).exists():
        return [path]
    if path.is_dir():
        pattern, missing = glob.escape(str(path)) + "/*.idx", f"{path} is a directory; name a token store in it"
        missing += f", or '{path / '**' / '*.idx'}' for all that are further below"
    elif glob.has_magic(str(path)) and not path.exists():
        pattern = str(path) if path.suffix == ".idx" else f"{path}.idx"
        missing = f"no token store matches {path}; make one with wlb prepare"
    else:
        return [_without_ending(path)]
    if found := glob.glob(pattern, recursive=True):
        return [Path(name.removesuffix(".idx")) for name in found]
    raise UserError(missing)


def _without_ending(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == ".idx" else path


def _natural(name: str) -> tuple[list[str | int], str]:
    parts = re.split("([0-9]+)", name)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)], name
