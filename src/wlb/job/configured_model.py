"""The model that ``[model]`` describes, by a preset or by the directory of a pretrained one.

The trainer, the simulator and ``wlb export`` ask here. Nothing is read but ``config.json``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from wlb.errors import UserError
from wlb.job.config import ModelConfig
from wlb.workload import ModelShape, model_shape
from wlb.workload.model import TransformerConfig
from wlb.workload.model_json import read_config

_DIMENSIONS = (
    *("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab_size"),
    *("sliding_window", "full_attention_layers"),
)
_VARIANTS = ("qkv_bias", "o_bias", "qk_norm")


def configured_model(model: ModelConfig, vocab_size: int | None = None) -> TransformerConfig:
    """The model that ``[model]`` describes.

    ``vocab_size`` is that of the token store, where it is known; the model's may be larger. Dimensions that are not
    given are those of the preset or of the pretrained model; the width of a head is hidden / heads where one of these
    is given. Raises ``UserError`` for dimensions that do not fit together or are not those of the pretrained model.
    """
    if model.pretrained is not None:
        return _pretrained(model.pretrained, model, vocab_size)
    return TransformerConfig(
        _preset_shape(model, vocab_size),
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
        rope_scaling=model.rope_scaling,
        tied_embeddings=model.tied_embeddings,
        **{name: getattr(model, name) for name in _VARIANTS},
    )


def _preset_shape(model: ModelConfig, vocab_size: int | None) -> ModelShape:
    given = {name: value for name in _DIMENSIONS if (value := getattr(model, name)) is not None}
    if vocab_size is not None:
        asked = given.setdefault("vocab_size", vocab_size)
        if asked < vocab_size:
            raise UserError(f"model.vocab_size = {asked} is below the {vocab_size} of the token store; raise it")
    shape = replace(model_shape(model.name), **given)
    if "head_dim" not in given and ("hidden" in given or "heads" in given):
        if shape.hidden % (2 * shape.heads):
            raise UserError(
                f"model.hidden = {shape.hidden} must be a multiple of 2 x model.heads = {2 * shape.heads}: rotary "
                "positions pair the dimensions of a head"
            )
        shape = replace(shape, head_dim=shape.hidden // shape.heads)
    return shape


def _pretrained(directory: Path, model: ModelConfig, vocab_size: int | None) -> TransformerConfig:
    """The model in ``directory``, with what ``[model]`` may change: rotary positions, ``norm_eps``, an untied head."""
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
    if vocab_size is not None and config.shape.vocab_size < vocab_size:
        raise UserError(
            f"{directory} has a vocabulary of {config.shape.vocab_size}, below the {vocab_size} of the token store; "
            f"prepare the store with its tokenizer: wlb prepare --tokenizer {directory}"
        )
    free = ("rope_theta", "norm_eps", "tied_embeddings")
    changes: dict[str, Any] = {name: given[name] for name in free if name in given}
    if model.rope_scaling is not None:
        changes["rope_scaling"] = model.rope_scaling
    return replace(config, **changes)
