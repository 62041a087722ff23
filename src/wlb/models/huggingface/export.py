"""Write a model as a Hugging Face directory: ``config.json``, safetensors and tokenizer files.

Tensors are asked for file by file, so that memory never holds more than one file of them (torch's
``HuggingFaceStorageWriter`` would have the whole model).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wlb.errors import UserError, require
from wlb.files import sync
from wlb.models.huggingface.config_json import to_config_json
from wlb.models.huggingface.weights import INDEX_FILE, hugging_face_name
from wlb.models.transformer import Transformer, TransformerConfig

_LARGEST_FILE = 5_000_000_000  # bytes; where transformers starts another file, unless asked otherwise


def export_model(
    config: TransformerConfig,
    fill: Callable[[dict[str, Tensor]], None],
    out: Path,
    *,
    dtype: torch.dtype,
    longest: int,
    companions: Mapping[str, bytes],
    more_config: Mapping[str, Any],
    largest_file: int = _LARGEST_FILE,
) -> int:
    """Write the model into the new directory ``out``, its weights as ``dtype``; returns the number of parameters.

    ``fill`` is given tensors by our names, of which those of one file hold up to ``largest_file`` bytes, and fills
    them. ``longest`` is the context in tokens. ``companions`` are other files by name, and ``more_config`` are keys of
    ``config.json``, of which those that describe the model give way to ours. Raises ``UserError`` where ``out`` exists
    or cannot be written, and for a model that no Hugging Face family computes.
    """
    kept = {key: value for key, value in more_config.items() if key not in ("rope_parameters", "dtype")}
    described = kept | to_config_json(config, longest=longest, dtype=str(dtype).removeprefix("torch."))
    with torch.device("meta"):
        parameters = dict(Transformer(config).to(dtype).named_parameters())
    refuse_existing(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as hidden:
            written = Path(hidden, "model")
            written.mkdir()
            for name, content in {**companions, "config.json": _json(described)}.items():
                (written / name).write_bytes(content)
            _write_weights(written, parameters, fill, largest_file)
            for path in (*written.iterdir(), written):
                sync(path)
            os.rename(written, out)  # fails if somebody made one with files in it meanwhile
        sync(out.parent)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from error
    return sum(parameter.numel() for parameter in parameters.values())


def refuse_existing(out: Path) -> None:
    """Raise ``UserError`` if there is anything at ``out``."""
    if os.path.lexists(out):
        raise UserError(f"{out} exists and is not overwritten; choose another directory or remove it")


def _write_weights(
    directory: Path, parameters: Mapping[str, Tensor], fill: Callable[[dict[str, Tensor]], None], largest_file: int
) -> None:
    save_file = require("safetensors.torch", "train").save_file
    groups: list[list[str]] = []
    filled = 0
    for name, parameter in parameters.items():
        if not groups or filled + parameter.nbytes > largest_file:
            groups, filled = [*groups, []], 0
        groups[-1].append(name)
        filled += parameter.nbytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        tensors = {name: torch.empty_like(parameters[name], device="cpu") for name in names}
        fill(tensors)
        renamed = {hugging_face_name(name): tensor for name, tensor in tensors.items()}
        save_file(renamed, directory / file, metadata={"format": "pt"})
        shutil.copymode(directory / "config.json", directory / file)  # safetensors keeps it from everybody else
        weight_map |= dict.fromkeys(renamed, file)
    if len(groups) > 1:
        total = sum(parameter.nbytes for parameter in parameters.values())
        (directory / INDEX_FILE).write_bytes(_json({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _json(document: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(document, indent=2)}\n".encode()
