"""Training that starts from a Hugging Face directory, ``model.pretrained``, instead of random weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from wlb.config import ModelConfig
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.models.huggingface.config import read_config
from wlb.models.huggingface.weights import PretrainedWeights
from wlb.models.transformer import RotaryScaling, TransformerConfig

_DIMENSIONS = ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab_size")
_VARIANTS = ("qkv_bias", "qk_norm")


def pretrained_config(directory: Path, model: ModelConfig) -> TransformerConfig:
    """The model in ``directory``, with what ``[model]`` may change: rotary positions, ``norm_eps``, an untied head.

    Raises ``UserError`` where ``[model]`` gives a dimension or variant that the pretrained weights do not have.
    """
    config = read_config(directory)
    given = {name: getattr(model, name) for name in model.model_fields_set}
    found = {name: getattr(config.shape, name) for name in _DIMENSIONS}
    found |= {name: getattr(config, name) for name in _VARIANTS}
    for name, value in found.items():
        if given.get(name) not in (None, value):
            raise UserError(f"model.{name} = {given[name]}, but {directory} has {value}; leave model.{name} out")
    if given.get("tied_embeddings") and not config.tied_embeddings:
        raise UserError(
            f"model.tied_embeddings = true, but {directory} has a head of its own; leave model.tied_embeddings out"
        )
    names = ("rope_theta", "norm_eps", "tied_embeddings")
    changes = {name: given[name] for name in names if name in given}
    if model.rope_scaling is not None:
        changes["rope_scaling"] = RotaryScaling(**model.rope_scaling.model_dump())
    return replace(config, **changes)


def check_weights(directory: Path, config: TransformerConfig) -> None:
    """Raise ``UserError`` unless ``directory`` holds the weights of ``config``.

    Only the headers of its files are read, and where a tied head is stored all the same, the head and the embedding.
    """
    PretrainedWeights.open(directory).check(config)


def tokenizer_warning(model: ModelConfig, store: TokenStore) -> str | None:
    """What to tell the user where ``store`` was not prepared with the tokenizer of the pretrained model, or None."""
    file = model.pretrained / "tokenizer.json" if model.pretrained is not None else None
    if store.tokenizer is None or file is None or not file.is_file():
        return None
    if store.tokenizer.get("sha256") == hashlib.sha256(file.read_text(encoding="utf-8").encode()).hexdigest():
        return None
    return (
        f"wlb: warning: {store.prefix} was prepared with the tokenizer {store.tokenizer.get('name')}, not with {file}; "
        "unless both give the same tokens, the pretrained weights are of no use"
    )


def load_weights(directory: Path, stages: Sequence[nn.Module]) -> None:
    """Fill the stages of this rank, each with the slices that it holds."""
    weights = PretrainedWeights.open(directory)
    for stage in stages:
        weights.load(stage)
