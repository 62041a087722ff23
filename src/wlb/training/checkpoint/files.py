"""The files of a checkpoint: those of ``torch.distributed.checkpoint``, and ``manifest.json``.

The manifest has all that is not a tensor, and size and CRC-32 of every file: torch does not compare the checksums that
are in its own files. A checkpoint is written in a hidden directory, which is renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb.files import move, sync, write_synced
from wlb.token_count import parse_count

MANIFEST = "manifest.json"
HIDDEN = ".writing-"
_PREFIX = "step-"
_CHUNK_BYTES = 1 << 23


@dataclass(frozen=True)
class Progress:
    """Where a job stands: steps trained, and the loader's state after them."""

    step: int
    loader: dict[str, Any]


class DamagedCheckpoint(Exception):
    """A checkpoint is not what was written; the message says what is wrong with it."""


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"{_PREFIX}{step:08d}"


def hidden_path(checkpoint: Path) -> Path:
    """Where ``checkpoint`` is while it is written."""
    return checkpoint.with_name(HIDDEN + checkpoint.name)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def complete_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in ``directory``, oldest first. All were complete once."""
    named = [path for path in directory.glob(f"{_PREFIX}*") if parse_count(path.name.removeprefix(_PREFIX)) is not None]
    return sorted(named, key=step_of)


def sums_of(directory: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Size and CRC-32 of files in ``directory``."""
    return {name: [(directory / name).stat().st_size, _crc32_of(directory / name)] for name in names}


def publish(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Add ``manifest`` to the hidden directory of ``checkpoint``, and give that its name."""
    hidden = hidden_path(checkpoint)
    write_synced(hidden / MANIFEST, json.dumps({"crc32": _crc32_of_json(manifest), **manifest}))
    sync(hidden)
    move(hidden, checkpoint)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest: ``step``, ``loader``, ``model``, and ``files`` with size and CRC-32 by name.

    Raises ``DamagedCheckpoint`` where it is not what was written.
    """
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_bytes())
        if manifest.pop("crc32") == _crc32_of_json(manifest):
            return manifest
    except OSError as error:
        raise DamagedCheckpoint(f"its {MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        pass  # garbage
    raise DamagedCheckpoint(f"its {MANIFEST} is not what was written")


def find_damage(checkpoint: Path, *, contents: bool, share: tuple[int, int] = (0, 1)) -> str | None:
    """What is wrong with ``checkpoint``, or None; ``contents`` compares checksums, otherwise only names and sizes.

    With ``share = (i, n)`` the i-th of n readers looks at every n-th file.
    """
    first, readers = share
    try:
        for name, (size, crc32) in sorted(read_manifest(checkpoint)["files"].items())[first::readers]:
            if (found := (checkpoint / name).stat().st_size) != size:
                return f"its {name} has {found} bytes instead of {size}"
            if contents and _crc32_of(checkpoint / name) != crc32:
                return f"its {name} does not have its checksum"
    except DamagedCheckpoint as damage:
        return str(damage)
    except OSError as error:
        return f"its {name} cannot be read: {error.strerror}"
    return None


def set_aside(checkpoint: Path) -> None:
    """Rename a damaged ``checkpoint``, so that it counts no more and can still be looked at."""
    with suppress(OSError):
        os.replace(checkpoint, checkpoint.with_name(f"damaged-{checkpoint.name}"))


def clean_up(directory: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` whole checkpoints, and what killed jobs have left; as far as possible."""
    whole = [path for path in complete_checkpoints(directory) if find_damage(path, contents=False) is None]
    with suppress(OSError):
        for outdated in whole[:-keep]:
            os.replace(outdated, hidden_path(outdated))  # first the name: a kill cannot leave half a checkpoint
    for hidden in directory.glob(f"{HIDDEN}*"):
        shutil.rmtree(hidden, ignore_errors=True)


def _crc32_of(file: Path) -> int:
    crc32 = 0
    with file.open("rb", buffering=0) as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _crc32_of_json(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
