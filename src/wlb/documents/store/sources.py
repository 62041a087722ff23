"""What names a token store: its prefix, which may be a URL, or a directory, a glob or a list of stores that are one."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Field

from wlb.documents.store.files import exists, is_url
from wlb.errors import UserError
from wlb.settings import check_path

# A prefix or PREFIX.idx, also at a URL, a directory of stores, a glob of them, or a list of these.
StoreSource: TypeAlias = "str | Path | Sequence[str | Path]"


def _check_kind(source: object) -> object:
    parts = source if isinstance(source, list | tuple) else [source]
    if not parts or not all(isinstance(part, str | Path) for part in parts):
        raise ValueError("must be the path of a token store, or a list of such paths")
    texts = tuple(str(check_path(part)) for part in parts)
    return texts if isinstance(source, list | tuple) else texts[0]


_StorePath = Annotated[str, Field(json_schema_extra={"format": "path"})]
# A setting that names a store.
StoreSetting = Annotated[
    _StorePath | Annotated[tuple[_StorePath, ...], Field(min_length=1)], BeforeValidator(_check_kind)
]


def store_prefixes(source: StoreSource) -> list[str]:
    """The prefixes of all stores that ``source`` names, sorted by name, in which 10 comes after 9.

    A prefix is returned whether or not there is a store, and nothing is asked of a server. Raises ``UserError`` for a
    directory or a glob without stores, for one that is named twice, and for a URL that is a glob or one of a list.
    """
    prefixes = [prefix for part in source_parts(source) for prefix in _expanded(part)]
    if len(prefixes) > 1:
        if remote := [prefix for prefix in prefixes if is_url(prefix)]:
            raise UserError(
                f"{remote[0]} is one of {len(prefixes)} shards, and shards cannot be at URLs; copy them to a disk, or "
                "name each as a store of data.mixture"
            )
        refuse_twice(prefixes)
    return sorted(prefixes, key=_natural)


def names_store(source: StoreSource) -> bool:
    """Whether ``source`` names a store that exists."""
    try:
        return all(exists(f"{prefix}.idx") for prefix in store_prefixes(source))
    except UserError:
        return False


def source_parts(source: StoreSource) -> list[str]:
    """``source`` as a list of texts."""
    parts = [str(part) for part in ([source] if isinstance(source, str | Path) else source)]
    if not parts or not all(part.strip() for part in parts):
        raise UserError(f"the path of a token store is empty (got {source!r}); name one")
    return parts


def source_name(source: StoreSource) -> str:
    """``source`` in messages."""
    return name_of(source_parts(source))


def name_of(prefixes: Sequence[str]) -> str:
    first, *others = prefixes
    return f"{first} and {len(others)} more" if others else first


def refuse_twice(prefixes: Sequence[str]) -> None:
    """Raise ``UserError`` where two of ``prefixes`` are the same store."""
    seen: dict[object, str] = {}
    for prefix in prefixes:
        index = f"{prefix}.idx"
        try:
            found = os.stat(index)
            key: object = (found.st_dev, found.st_ino)  # also of a link to it, of either kind
        except OSError:
            key = index
        if key in seen:
            raise UserError(f"a token store is named twice, as {seen[key]} and as {prefix}; name it once")
        seen[key] = prefix


def _expanded(path: str) -> list[str]:
    if is_url(path):
        if set("*?") & set(path):
            raise UserError(f"{path} is a pattern, and stores at URLs cannot be listed; name one store")
        return [path.removesuffix(".idx")]
    path = path.rstrip("/") or "/"
    if os.path.exists(f"{path}.idx"):
        return [path]
    if os.path.isdir(path):
        pattern, missing = os.path.join(glob.escape(path), "*.idx"), f"{path} is a directory; name a token store in it"
        missing += f", or '{Path(path, '**', '*.idx')}' for all that are further below"
    elif glob.has_magic(path) and not os.path.exists(path):
        pattern = path if path.endswith(".idx") else f"{path}.idx"
        missing = f"no token store matches {path}; make one with wlb prepare"
    else:
        return [path.removesuffix(".idx")]
    if found := glob.glob(pattern, recursive=True):
        return [name.removesuffix(".idx") for name in found]
    raise UserError(missing)


def _natural(name: str) -> tuple[list[str | int], str]:
    parts = re.split("([0-9]+)", name)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)], name
