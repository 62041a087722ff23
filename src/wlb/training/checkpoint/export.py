"""Export a checkpoint to a Hugging Face directory, in one process without a process group."""

import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from wlb.documents.store.files import store_prefixes
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError, require
from wlb.files import sync
from wlb.job.config import CheckpointConfig, JobConfig
from wlb.models.configured_model import configured_model
from wlb.models.huggingface.config_json import to_config_json
from wlb.models.huggingface.weights import hugging_face_names
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.training.checkpoint import files as checkpoints
from wlb.workload.model_json import read_config_json

_LARGEST_FILE = 5_000_000_000  # bytes; by default transformers starts another file here

# The files beside the weights of a published model that still hold for a trained one.
_KEPT_FILES = (
    "added_tokens.json chat_template.jinja chat_template.json generation_config.json merges.txt "
    "special_tokens_map.json tokenizer.json tokenizer.model tokenizer_config.json vocab.json"
)


def export_checkpoint(config: JobConfig, out: Path, *, step: int | None, dtype: torch.dtype) -> dict[str, Any]:
    """Write the model of the checkpoint of ``step``, by default the newest, into the new directory ``out``.

    Returns ``checkpoint``, ``step``, the number of ``parameters`` and the names of ``tokenizer_files``. Raises
    ``UserError`` if there is no such checkpoint, if it is damaged or holds another model, or if ``out`` exists.
    """
    refuse_existing(out)
    checkpoint, others = _chosen(config.checkpoint, step)
    damage = checkpoints.find_damage(checkpoint, contents=True)
    if damage is None:
        recorded = checkpoints.read_manifest(checkpoint)["model"]
        model = configured_model(config.model, config.model.vocab_size or recorded["vocab_size"])
        checkpoints.check_model(checkpoint, recorded, model)
        with torch.device("meta"):
            parameters = Transformer(model).to(dtype).named_parameters()
        tensors = {name: torch.empty_like(parameter, device="cpu") for name, parameter in parameters}
        try:
            with _alone():
                dcp.load(dict(tensors), checkpoint_id=checkpoint, no_dist=True)
        except CheckpointException:
            damage = "it cannot be read"
    if damage is not None:
        remedy = f"choose another --step, of {others}" if others else "there is no other"
        raise UserError(f"checkpoint {checkpoint} is damaged: {damage}; {remedy}")
    files, settings = _companions(config)
    longest = max(config.data.context_window, settings.get("max_position_embeddings", 0))
    export_model(model, tensors, out, longest=longest, companions=files, more_config=settings)
    return {
        "checkpoint": str(checkpoint),
        "step": checkpoints.step_of(checkpoint),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "tokenizer_files": [name for name in files if name != "generation_config.json"],
    }


def _chosen(config: CheckpointConfig, step: int | None) -> tuple[Path, str]:
    """The checkpoint to export, and the steps of the other ones for messages."""
    if config.dir is None:
        raise UserError("the configuration has no checkpoint.dir; add --set checkpoint.dir=DIR")
    named = checkpoints.complete_checkpoints(config.dir)
    if not named:
        raise UserError(f"checkpoint.dir {config.dir} holds no checkpoint; name another with --set checkpoint.dir=DIR")
    checkpoint = named[-1] if step is None else checkpoints.checkpoint_path(config.dir, step)
    steps = ", ".join(str(checkpoints.step_of(path)) for path in named if path != checkpoint)
    if checkpoint not in named:
        raise UserError(f"checkpoint.dir {config.dir} holds no checkpoint of step {step}; choose one of {steps}")
    return checkpoint, steps


def _companions(config: JobConfig) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Files and settings of the pretrained model, or of the tokenizer that was trained for the store."""
    if (directory := config.model.pretrained) is not None:
        kept = [directory / name for name in _KEPT_FILES.split() if (directory / name).is_file()]
        return {path.name: path.read_bytes() for path in kept}, read_config_json(directory)
    prefixes: list[str] = []
    for source in config.data.stores:
        with suppress(UserError):  # the store may no longer be there
            prefixes += store_prefixes(source)
    prefix = next((prefix for prefix in prefixes if Path(f"{prefix}.tokenizer.json").is_file()), None)
    if prefix is None:
        return {}, {}
    store = TokenStore.open(prefix)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"eos_token": store.tokenizer["end_token"]} if store.tokenizer else {}
    ids = {"eos_token_id": store.sidecar["end_token"]} if "end_token" in store.sidecar else {}
    tokenizer = Path(f"{prefix}.tokenizer.json").read_bytes()
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": json.dumps(settings).encode()}, ids


def export_model(
    config: TransformerConfig,
    tensors: Mapping[str, Tensor],
    out: Path,
    *,
    longest: int,
    companions: Mapping[str, bytes],
    more_config: Mapping[str, Any],
) -> None:
    """Write ``tensors``, under our names and all of one type, as a model in the new directory ``out``.

    ``longest`` is the context in tokens. ``companions`` are other files by name. ``more_config`` are further keys of
    ``config.json``; our keys override those that describe the model. Raises ``UserError`` if ``out`` exists or cannot
    be written, and for a model that no Hugging Face family computes.
    """
    require("safetensors", "train")
    refuse_existing(out)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    kept = {key: value for key, value in more_config.items() if key not in ("rope_parameters", "dtype")}
    document = to_config_json(config, longest=longest, dtype=dtype)
    described, named = json.dumps(kept | document, indent=2), _named(tensors, document["model_type"], config)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as hidden, _alone():
            written = Path(hidden, "model")
            writer = HuggingFaceStorageWriter(str(written), _files(named))
            dcp.save(named, storage_writer=writer)
            for name, content in {**companions, "config.json": f"{described}\n".encode()}.items():
                (written / name).write_bytes(content)
            for path in (*written.iterdir(), written):
                sync(path)
            os.rename(written, out)  # fails if ``out`` has appeared meanwhile and is not empty
        sync(out.parent)
    except (OSError, CheckpointException) as error:
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise UserError(f"{out} cannot be written: {getattr(cause, 'strerror', None) or cause}") from error


def refuse_existing(out: Path) -> None:
    """Raise ``UserError`` if there is anything at ``out``."""
    if os.path.lexists(out):
        raise UserError(f"{out} exists and is not overwritten; choose another directory or remove it")


@contextmanager
def _alone() -> Iterator[None]:
    """Silence the warning of ``torch.distributed.checkpoint`` that this process is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        yield


def _named(tensors: Mapping[str, Tensor], family: str, config: TransformerConfig) -> dict[str, Tensor]:
    """``tensors`` by their names in ``family``; an expert is a view of its rows."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        names = hugging_face_names(name, family, config.shape)
        named |= zip(names, tensor.chunk(len(names)), strict=True)
    return named


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of the file, from 1, for each tensor; a tensor may be larger than a file."""
    files: dict[str, int] = {}
    number = filled = 0
    for name, tensor in tensors.items():
        if not number or filled + tensor.nbytes > _LARGEST_FILE:
            number, filled = number + 1, 0
        files[name] = number
        filled += tensor.nbytes
    return files
