"""The files of a checkpoint, and their verification.

A checkpoint is a directory ``step-00000100`` with the files that ``torch.distributed.checkpoint`` wrote and
``manifest.json``: the step, the loader's state, the model, and size and CRC-32 of every file, under a CRC-32 of its
own. The manifest is written last, under a hidden name that is then changed, so a directory of that name was once
complete; ``find_damage`` says whether it still is. CRC-32 finds accidents (a full disk, a torn copy, flipped bits), at
several GB/s, and does not try to find intent: nothing read from a checkpoint is executed (``storage``).
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wlb.errors import UserError
from wlb.files import move, sync, write_synced
from wlb.token_count import parse_count

FORMAT = 4
MANIFEST = "manifest.json"
HIDDEN = ".writing-"
_PREFIX = "step-"
_CHUNK_BYTES = 1 << 23


class FileRecord(NamedTuple):
    """Bytes of a file and their CRC-32."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Progress:
    """Where a job stands: steps trained, and the loader's state after them."""

    step: int
    loader: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    ``model`` is what ``resuming.model_record`` makes of the model that it holds; ``files`` are all its files but the
    manifest, by name.
    """

    progress: Progress
    model: Mapping[str, Any]
    files: Mapping[str, FileRecord]


class DamagedCheckpoint(Exception):
    """A checkpoint is not what was written; the message says what is wrong with it."""


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"{_PREFIX}{step:08d}"


def hidden_path(checkpoint: Path) -> Path:
    """Where ``checkpoint`` is while it is written."""
    return checkpoint.with_name(HIDDEN + checkpoint.name)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def named_checkpoints(directory: Path) -> list[Path]:
    """Whatever carries the name of a checkpoint in ``directory``, oldest first."""
    named = [path for path in directory.glob(f"{_PREFIX}*") if parse_count(path.name.removeprefix(_PREFIX)) is not None]
    return sorted(named, key=step_of)


def complete_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in ``directory`` that were written to their end, oldest first."""
    return [path for path in named_checkpoints(directory) if (path / MANIFEST).is_file()]


def start_writing(checkpoint: Path) -> None:
    """Make the hidden directory of ``checkpoint``, after removing what killed jobs have left."""
    for unfinished in checkpoint.parent.glob(f"{HIDDEN}*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    hidden_path(checkpoint).mkdir(parents=True)


def publish(checkpoint: Path, manifest: Manifest) -> None:
    """Complete ``checkpoint`` with its manifest and give it its name, in place of a damaged one of this very step."""
    hidden = hidden_path(checkpoint)
    write_manifest(hidden, manifest)
    if checkpoint.exists():
        _delete(checkpoint)
    move(hidden, checkpoint)


def delete_outdated(good: Sequence[Path], keep: int) -> None:
    """Delete the checkpoints that are older than the newest ``keep`` of ``good``, which are in order.

    Of ``good`` those count that are still whole, so at least ``keep`` of them remain, or all. What else there is in the
    directory is damaged: it does not count, and is left to be looked at until it is as old as that.
    """
    whole = [checkpoint for checkpoint in good if is_whole(checkpoint)]
    if len(whole) < keep:
        return
    oldest = whole[-keep]
    for outdated in complete_checkpoints(oldest.parent):
        if step_of(outdated) < step_of(oldest):
            with suppress(OSError):  # no reason not to write another one; a disk that fills up says so itself
                _delete(outdated)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest into ``path``, and all of that directory to the disk."""
    progress = manifest.progress
    content = {
        "format": FORMAT,
        "step": progress.step,
        "loader": progress.loader,
        "model": dict(manifest.model),
        "files": dict(manifest.files),
    }
    write_synced(path / MANIFEST, json.dumps({**content, "crc32": _crc32_of(content)}))
    sync(path)


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of ``checkpoint``.

    Raises ``DamagedCheckpoint`` where it is missing or not what was written, and ``UserError`` where another version
    has written it.
    """
    try:
        with open(open_regular(checkpoint / MANIFEST), "rb") as file:
            content = json.load(file)
        written, checksum = content.pop("format"), content.pop("crc32", None)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"it has no {MANIFEST}, so it was not written or copied to its end") from None
    except OSError as error:
        raise DamagedCheckpoint(f"its {MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise DamagedCheckpoint(f"its {MANIFEST} is not a manifest") from None
    if written != FORMAT:
        raise UserError(
            f"checkpoint {checkpoint} has format {written!r}, this version reads {FORMAT}; continue with the version "
            "that wrote it or start anew with another checkpoint.dir"
        )
    if checksum != _crc32_of({"format": FORMAT, **content}):
        raise DamagedCheckpoint(f"its {MANIFEST} was changed after it was written")
    files = {name: FileRecord(*record) for name, record in content["files"].items()}
    if foreign := [name for name in files if not is_plain_name(name)]:
        raise DamagedCheckpoint(f"its {MANIFEST} names {foreign[0]!r}, which is not a file of the checkpoint")
    return Manifest(Progress(content["step"], content["loader"]), content["model"], files)


def find_damage(checkpoint: Path, *, contents: bool, share: tuple[int, int] = (0, 1)) -> str | None:
    """What is wrong with ``checkpoint``, or None. Raises ``UserError`` where another version has written it.

    ``contents`` compares checksums, otherwise only names and sizes. With ``share = (i, n)`` the i-th of n readers
    looks at every n-th file.
    """
    if checkpoint.is_symlink():
        return "it is a symbolic link"
    try:
        files = read_manifest(checkpoint).files
    except DamagedCheckpoint as damage:
        return str(damage)
    first, readers = share
    names = sorted(files)[first::readers]
    with ThreadPoolExecutor() as executor:  # one process may have to read what hundreds of ranks have written
        problems = executor.map(lambda name: _damage_of(checkpoint / name, files[name], contents), names)
        return next((f"its {name} {problem}" for name, problem in zip(names, problems, strict=True) if problem), None)


def is_whole(checkpoint: Path) -> bool:
    """Whether ``checkpoint`` is one of this version with all its files in full; checksums are not compared."""
    try:
        return find_damage(checkpoint, contents=False) is None
    except UserError:
        return False


def is_plain_name(name: object) -> bool:
    """Whether ``name`` names a file inside a directory, and nothing outside it."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


def open_regular(path: Path) -> int:
    """A descriptor to read the regular file ``path``; a symbolic link is not followed. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is not a regular file")
    return descriptor


def _damage_of(file: Path, record: FileRecord, contents: bool) -> str | None:
    try:
        with open(open_regular(file), "rb", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != record.size:
                return f"has {size} bytes instead of {record.size}"
            crc32 = 0
            while contents and (chunk := opened.read(_CHUNK_BYTES)):
                crc32 = zlib.crc32(chunk, crc32)
            if contents and crc32 != record.crc32:
                return "does not have its checksum"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def _crc32_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _delete(checkpoint: Path) -> None:
    unwanted = checkpoint.with_name(f"{HIDDEN}deleted-{checkpoint.name}")
    os.replace(checkpoint, unwanted)  # first the name, so that a kill cannot leave half a checkpoint
    shutil.rmtree(unwanted, ignore_errors=True)
