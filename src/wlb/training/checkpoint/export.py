"""From a checkpoint to a Hugging Face directory, in one process without a process group."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from wlb.documents.store.files import StoreSource, store_prefixes
from wlb.documents.store.index import store_path
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.job.config import CheckpointConfig, JobConfig
from wlb.models.configured_model import configured_model
from wlb.models.huggingface.export import export_model, refuse_existing
from wlb.models.huggingface.weights import read_tensors
from wlb.training.checkpoint.files import (
    checkpoint_path,
    complete_checkpoints,
    find_damage,
    read_manifest,
    step_of,
)
from wlb.training.checkpoint.resuming import check_model
from wlb.workload.model_json import read_config_json

# What lies beside the weights of a published model and stays true of a trained one.
_KEPT_FILES = (
    "added_tokens.json chat_template.jinja chat_template.json generation_config.json merges.txt "
    "special_tokens_map.json tokenizer.json tokenizer.model tokenizer_config.json vocab.json"
)


@dataclass(frozen=True)
class Exported:
    """What was exported: from which checkpoint, parameters counted once, and the names of the tokenizer's files."""

    checkpoint: Path
    step: int
    parameters: int
    tokenizer: tuple[str, ...]


def export_checkpoint(config: JobConfig, out: Path, *, step: int | None, dtype: torch.dtype) -> Exported:
    """Write the model of the checkpoint of ``step``, or of the newest, into the new directory ``out``.

    Raises ``UserError`` where there is no such checkpoint, it is damaged or holds another model, or ``out`` exists.
    """
    refuse_existing(out)
    checkpoint, others = _chosen(config.checkpoint, step)
    damaged = f"checkpoint {checkpoint} is damaged: {{}}; choose another --step, of {others}"
    if damage := find_damage(checkpoint, contents=True):
        raise UserError(damaged.format(damage))
    recorded = read_manifest(checkpoint)["model"]
    model = configured_model(config.model, config.model.vocab_size or recorded["vocab_size"])
    check_model(checkpoint, recorded, model)
    companions, settings = _companions(config)
    longest = max(config.data.context_window, settings.get("max_position_embeddings", 0))
    reader = FileSystemReader(checkpoint)
    try:
        parameters = export_model(
            model,
            lambda tensors: read_tensors(tensors, reader),
            out,
            dtype=dtype,
            longest=longest,
            companions=companions,
            more_config=settings,
        )
    except CheckpointException as error:  # as its job deletes it
        raise UserError(damaged.format("it cannot be read")) from error
    tokenizer = tuple(name for name in companions if name != "generation_config.json")
    return Exported(checkpoint, step_of(checkpoint), parameters, tokenizer)


def _chosen(config: CheckpointConfig, step: int | None) -> tuple[Path, str]:
    """The checkpoint to export, and the steps of the others."""
    if config.dir is None:
        raise UserError("the configuration has no checkpoint.dir; add --set checkpoint.dir=DIR")
    named = complete_checkpoints(config.dir)
    if not named:
        raise UserError(f"checkpoint.dir {config.dir} holds no checkpoint; name another with --set checkpoint.dir=DIR")
    checkpoint = named[-1] if step is None else checkpoint_path(config.dir, step)
    steps = ", ".join(str(step_of(path)) for path in named if path != checkpoint) or "none"
    if checkpoint not in named:
        raise UserError(f"checkpoint.dir {config.dir} holds no checkpoint of step {step}; it has {steps}")
    return checkpoint, steps


def _companions(config: JobConfig) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Files and settings of the pretrained model, or of the tokenizer that was trained for the store."""
    if (directory := config.model.pretrained) is not None:
        kept = [directory / name for name in _KEPT_FILES.split() if (directory / name).is_file()]
        return {path.name: path.read_bytes() for path in kept}, read_config_json(directory)
    prefixes = (prefix for source in config.data.stores for prefix in _prefixes(source))
    prefix = next((prefix for prefix in prefixes if store_path(prefix, ".tokenizer.json").is_file()), None)
    if prefix is None:
        return {}, {}
    store = TokenStore.open(prefix)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"eos_token": store.tokenizer["end_token"]} if store.tokenizer else {}
    ids = {"eos_token_id": store.sidecar["end_token"]} if "end_token" in store.sidecar else {}
    tokenizer = store_path(prefix, ".tokenizer.json").read_bytes()
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": json.dumps(settings).encode()}, ids


def _prefixes(source: StoreSource) -> list[str]:
    """Those of a store, which may be elsewhere by now."""
    try:
        return store_prefixes(source)
    except UserError:
        return []
