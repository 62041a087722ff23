"""From a checkpoint to a Hugging Face directory, in one process without a process group.

The checkpoint holds the weights in full precision under names that do not depend on the layout. The configuration must
describe the model that the checkpoint was written with, and every file of it is compared with its checksum first.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from wlb.documents.store.files import StoreSource, store_prefixes
from wlb.documents.store.index import store_path
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.job.config import CheckpointConfig, JobConfig
from wlb.models.configured_model import configured_model
from wlb.models.huggingface.export import export_model, refuse_existing
from wlb.models.transformer import Transformer
from wlb.training.checkpoint.files import (
    DamagedCheckpoint,
    checkpoint_path,
    find_damage,
    named_checkpoints,
    read_manifest,
    step_of,
)
from wlb.training.checkpoint.resuming import check_model, check_tensors
from wlb.training.checkpoint.storage import ConfinedReader, first_failure
from wlb.workload.model_json import read_config_json

_TRIES = 5  # to read the newest checkpoint before its job deletes it

# What lies beside the weights of a published model and stays true of a trained one.
_KEPT_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
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

    Where the job writes newer ones meanwhile and deletes that one, the newest of these takes its place. Raises
    ``UserError`` where there is no such checkpoint, it is damaged or holds another model, or ``out`` exists.
    """
    refuse_existing(out)
    for _ in range(_TRIES):
        checkpoint, others = _chosen(config.checkpoint, step)
        try:
            return _export(config, checkpoint, out, dtype)
        except (DamagedCheckpoint, UserError) as error:
            if not checkpoint.exists():
                continue  # whatever was wrong with it
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"checkpoint {checkpoint} is damaged: {error}; choose another --step, of {others}"
            ) from error
    raise UserError(
        f"the job deletes its checkpoints in {config.checkpoint.dir} faster than they are read ({_TRIES} tries); "
        "export when it has ended, or raise its checkpoint.keep or checkpoint.every"
    )


def _chosen(config: CheckpointConfig, step: int | None) -> tuple[Path, str]:
    """The checkpoint to export, and the steps of the others."""
    if config.dir is None:
        raise UserError("the configuration has no checkpoint.dir; add --set checkpoint.dir=DIR")
    named = named_checkpoints(config.dir)
    if not named:
        raise UserError(f"checkpoint.dir {config.dir} holds no checkpoint; name another with --set checkpoint.dir=DIR")
    checkpoint = named[-1] if step is None else checkpoint_path(config.dir, step)
    others = [step_of(path) for path in named if path != checkpoint]
    steps = f"{', '.join(map(str, others))}" or "none"
    if checkpoint not in named:
        raise UserError(f"checkpoint.dir {config.dir} holds no checkpoint of step {step}; it has {steps}")
    return checkpoint, steps


def _export(config: JobConfig, checkpoint: Path, out: Path, dtype: torch.dtype) -> Exported:
    """Raises ``DamagedCheckpoint`` and ``UserError``."""
    if damage := find_damage(checkpoint, contents=True):
        raise DamagedCheckpoint(damage)
    recorded = read_manifest(checkpoint).model
    model = configured_model(config.model, config.model.vocab_size or recorded["vocab_size"])
    check_model(checkpoint, recorded, model)
    held = ConfinedReader(checkpoint).tensors()
    check_tensors(checkpoint, held, model)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Transformer(model).parameters())

    files, settings = _companions(config)
    longest = max(config.data.context_window, settings.get("max_position_embeddings", 0))
    read = partial(_read, checkpoint, held)
    export_model(model, read, out, dtype=dtype, longest=longest, companions=files, more_config=settings)
    tokenizer = tuple(name for name in files if name != "generation_config.json")
    return Exported(checkpoint, step_of(checkpoint), parameters, tokenizer)


def _read(checkpoint: Path, held: Mapping[str, TensorStorageMetadata], names: Sequence[str]) -> dict[str, Tensor]:
    """The tensors ``names`` of those that the checkpoint holds. Raises ``DamagedCheckpoint``."""
    tensors = {name: torch.empty(held[name].size, dtype=held[name].properties.dtype) for name in names}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # not initialised: there is one process
            dcp.load(tensors, storage_reader=ConfinedReader(checkpoint), no_dist=True)
    except CheckpointException as error:
        raise DamagedCheckpoint(f"it cannot be read: {first_failure(error)}") from error
    return tensors


def _prefixes(source: StoreSource) -> list[str]:
    """Those of a store, which may be elsewhere by now."""
    try:
        return store_prefixes(source)
    except UserError:
        return []


def _companions(config: JobConfig) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Files and settings of the pretrained model, or of the tokenizer that was trained for the store."""
    if (directory := config.model.pretrained) is not None:
        kept = [directory / name for name in _KEPT_FILES if (directory / name).is_file()]
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
