"""Write a model as a Hugging Face directory: ``config.json``, safetensors and tokenizer files.

Tensors are asked for file by file, so that memory never holds more than one file of them. The directory is made under a
hidden name and renamed when it is complete and on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wlb.errors import UserError, require
from wlb.files import sync
from wlb.models.huggingface.config_json import to_config_json
from wlb.models.huggingface.weights import INDEX_FILE, WEIGHTS_FILE, hugging_face_name
from wlb.models.transformer import Transformer, TransformerConfig

_LARGEST_FILE = 5_000_000_000  # bytes; where transformers starts another file, unless asked otherwise

# Tensors by our names, in any type and in memory of their own.
ReadTensors = Callable[[Sequence[str]], Mapping[str, Tensor]]


def export_model(
    config: TransformerConfig,
    read: ReadTensors,
    out: Path,
    *,
    dtype: torch.dtype,
    longest: int,
    companions: Mapping[str, bytes],
    more_config: Mapping[str, Any],
    largest_file: int = _LARGEST_FILE,
) -> None:
    """Write the model into the new directory ``out``, its weights as ``dtype``.

    ``longest`` is the context in tokens, and ``largest_file`` bytes are what a file of weights holds unless one tensor
    alone is larger. ``companions`` are other files by name, and ``more_config`` are keys of ``config.json``, of which
    those that describe the model give way to ours. Raises ``UserError`` where ``out`` exists or cannot be written, and
    for a model that no Hugging Face family computes.
    """
    document = to_config_json(config, longest=longest, dtype=str(dtype).removeprefix("torch."))
    kept = {key: value for key, value in more_config.items() if key not in ("rope_parameters", "dtype")}
    with _new_directory(out) as directory:
        _write_json(directory / "config.json", kept | document)
        for name, content in companions.items():
            (directory / name).write_bytes(content)
        _write_weights(directory, plan_files(config, dtype.itemsize, largest_file), read, dtype)


def refuse_existing(out: Path) -> None:
    """Raise ``UserError`` if there is anything at ``out``."""
    if os.path.lexists(out):
        raise UserError(f"{out} exists and is not overwritten; choose another directory or remove it")


def plan_files(config: TransformerConfig, itemsize: int, largest_file: int) -> list[list[str]]:
    """Our names of the model's parameters, in the model's order, in groups that make one file each."""
    with torch.device("meta"):
        model = Transformer(config)
    files: list[list[str]] = []
    filled = 0
    for name, parameter in model.named_parameters():
        size = prod(parameter.shape) * itemsize
        if not files or filled + size > largest_file:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def _write_weights(directory: Path, files: list[list[str]], read: ReadTensors, dtype: torch.dtype) -> None:
    save_file = require("safetensors.torch", "train").save_file
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, 1):
        file = WEIGHTS_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {hugging_face_name(name): tensor.to(dtype).contiguous() for name, tensor in read(names).items()}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        shutil.copymode(directory / "config.json", directory / file)  # safetensors keeps it from everybody else
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        _write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A directory that becomes ``out`` when the block ends well, and is gone when it does not."""
    refuse_existing(out)
    hidden = out.with_name(f".{out.name}.writing-{os.getpid()}")
    try:
        hidden.mkdir(parents=True)
        yield hidden
        for path in (*hidden.iterdir(), hidden):
            sync(path)
        os.rename(hidden, out)  # fails if somebody made one with files in it meanwhile
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    sync(out.parent)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
