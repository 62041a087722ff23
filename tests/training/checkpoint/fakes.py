"""Checkpoints that no job has written, and what can happen to the files of any."""

from __future__ import annotations

import zlib
from pathlib import Path

from wlb.training.checkpoint.files import (
    FileRecord,
    Manifest,
    Progress,
    checkpoint_path,
    hidden_path,
    publish,
    start_writing,
    write_manifest,
)

FILES = {"__0_0.distcp": b"weights" * 100, "__1_0.distcp": b"moments" * 90, ".metadata": b"names"}


def write_checkpoint(directory: Path, step: int) -> Path:
    checkpoint = checkpoint_path(directory, step)
    start_writing(checkpoint)
    for name, content in FILES.items():
        (hidden_path(checkpoint) / name).write_bytes(content)
    records = {name: FileRecord(len(content), zlib.crc32(content)) for name, content in FILES.items()}
    publish(checkpoint, Manifest(Progress(step, {"identity": {"data.seed": 1}}), {"heads": 2}, records))
    return checkpoint


def fake_checkpoint(directory: Path, step: int, complete: bool = True) -> None:
    """One without files."""
    path = directory / f"step-{step:08d}"
    path.mkdir(parents=True)
    if complete:
        write_manifest(path, Manifest(Progress(step, {"identity": {}}), {}, {}))


def damage(checkpoint: Path, how: str) -> None:
    """Flip or truncate the last file of tensors (``flipped``, ``truncated``), or remove the file that is named."""
    file = max(checkpoint.glob("*.distcp"))
    if how == "flipped":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        (checkpoint / how).unlink()
