"""Whether the files of a store are still those that were opened: they have the same size and time of change."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from wlb.errors import UserError

# Of .idx, .bin and .mask: bytes and time of change in nanoseconds; None where there is no such file, or it is remote.
Stamps: TypeAlias = "tuple[tuple[int, int] | None, ...]"

_ENDINGS = (".idx", ".bin", ".mask")
_NANO = 1e-9


def stamps_of(prefix: Path) -> Stamps:
    """Those of the store at ``prefix``, to be taken before it is opened."""
    return tuple(_stamp(f"{prefix}{ending}") for ending in _ENDINGS)


def check_unchanged(prefix: Path, opened: Stamps) -> None:
    """Raise ``UserError`` where a file of the store at ``prefix`` has other stamps than when it was ``opened``."""
    for ending, before, now in zip(_ENDINGS, opened, stamps_of(prefix), strict=True):
        if before is not None and now != before:
            raise UserError(
                f"{prefix}{ending} changed while it was in use: it had {_in_words(before)}, now "
                f"{'it is gone' if now is None else f'it has {_in_words(now)}'}; put back what was there, or start "
                "anew on the new store"
            )


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _in_words(stamp: tuple[int, int]) -> str:
    size, changed = stamp
    return f"{size} bytes of {datetime.fromtimestamp(changed * _NANO).isoformat(' ', 'milliseconds')}"
