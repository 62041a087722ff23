"""Write a model as a Hugging Face directory: ``config.json``, safetensors by torch's writer, and tokenizer files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from wlb.errors import UserError, require
from wlb.files import sync
from wlb.models.huggingface.config_json import to_config_json
from wlb.models.huggingface.weights import alone, hugging_face_name
from wlb.models.transformer import TransformerConfig

_LARGEST_FILE = 5_000_000_000  # bytes; where transformers starts another file, unless asked otherwise


def export_model(
    config: TransformerConfig,
    tensors: Mapping[str, Tensor],
    out: Path,
    *,
    longest: int,
    companions: Mapping[str, bytes],
    more_config: Mapping[str, Any],
    largest_file: int = _LARGEST_FILE,
) -> None:
    """Write the model with ``tensors``, by our names and all of one type, into the new directory ``out``.

    ``longest`` is the context in tokens, and ``largest_file`` bytes are what a file of weights holds unless one tensor
    alone is larger. ``companions`` are other files by name, and ``more_config`` are keys of ``config.json``, of which
    those that describe the model give way to ours. Raises ``UserError`` where ``out`` exists or cannot be written, and
    for a model that no Hugging Face family computes.
    """
    require("safetensors", "train")
    refuse_existing(out)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    kept = {key: value for key, value in more_config.items() if key not in ("rope_parameters", "dtype")}
    described = json.dumps(kept | to_config_json(config, longest=longest, dtype=dtype), indent=2)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as hidden, alone():
            written = Path(hidden, "model")
            writer = HuggingFaceStorageWriter(str(written), _files(tensors, largest_file))
            dcp.save({hugging_face_name(name): tensor for name, tensor in tensors.items()}, storage_writer=writer)
            for name, content in {**companions, "config.json": f"{described}\n".encode()}.items():
                (written / name).write_bytes(content)
            for path in (*written.iterdir(), written):
                sync(path)
            os.rename(written, out)  # fails if somebody made one with files in it meanwhile
        sync(out.parent)
    except (OSError, CheckpointException) as error:
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise UserError(f"{out} cannot be written: {getattr(cause, 'strerror', None) or cause}") from error


def refuse_existing(out: Path) -> None:
    """Raise ``UserError`` if there is anything at ``out``."""
    if os.path.lexists(out):
        raise UserError(f"{out} exists and is not overwritten; choose another directory or remove it")


def _files(tensors: Mapping[str, Tensor], largest_file: int) -> dict[str, int]:
    """The number of the file, from 1, that each tensor goes into, by its name there."""
    files: dict[str, int] = {}
    number = filled = 0
    for name, tensor in tensors.items():
        if not number or filled + tensor.nbytes > largest_file:
            number, filled = number + 1, 0
        files[hugging_face_name(name)] = number
        filled += tensor.nbytes
    return files
