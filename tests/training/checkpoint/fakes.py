"""Checkpoints that no job has written, and what can happen to the files of any."""

from pathlib import Path
from typing import Any

from wlb.training.checkpoint.files import checkpoint_path, hidden_path, publish, sums_of

FILES = {"__0_0.distcp": b"weights" * 100, "__1_0.distcp": b"moments" * 90, ".metadata": b"names"}


def write_checkpoint(
    directory: Path, step: int, files: dict[str, bytes] | None = None, model: dict[str, Any] | None = None
) -> Path:
    checkpoint, contents = checkpoint_path(directory, step), FILES if files is None else files
    hidden_path(checkpoint).mkdir(parents=True)
    for name, content in contents.items():
        (hidden_path(checkpoint) / name).write_bytes(content)
    manifest = {
        "step": step,
        "loader": {"settings": {"order": {}, "packing": {}}, "first_epoch": 0, "planner": {}},
        "model": model or {"heads": 2},
    }
    publish(checkpoint, manifest | {"files": sums_of(hidden_path(checkpoint), contents)})
    return checkpoint


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
