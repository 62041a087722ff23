"""The shape of the model that ``[model]`` describes, from a preset or from the directory of a pretrained model.

Only ``config.json`` is read. ``wlb.models.configured_model`` builds the model.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wlb.errors import UserError
from wlb.job.config import ModelConfig
from wlb.workload import ModelShape, model_shape
from wlb.workload.model_json import flag, read_config_json, read_shape
from wlb.workload.shapes import Experts

_DIMENSIONS = (
    *("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab_size"),
    *("sliding_window", "full_attention_layers"),
)
_EXPERTS = {  # of [model], by the name of ``Experts``
    "count": "experts",
    "active": "experts_per_token",
    "ffn_hidden": "expert_hidden",
    "shared_hidden": "shared_expert_hidden",
    "dense_layers": "first_dense_layers",
}


def configured_shape(model: ModelConfig, vocab_size: int | None = None) -> ModelShape:
    """The shape that ``[model]`` describes.

    ``vocab_size`` is that of the token store, if known; the model may have a larger one. Dimensions that are not given
    come from the preset or the pretrained model; the width of a head is hidden / heads if one of these is given. Raises
    ``UserError`` for dimensions that do not fit together or differ from the pretrained model.
    """
    directory = model.pretrained
    if directory is None:
        return _preset_shape(model, vocab_size)
    shape = read_shape(directory)
    of_experts = {key: getattr(shape.experts, name, None) for name, key in _EXPERTS.items()}
    refuse_changes(model, {name: getattr(shape, name) for name in _DIMENSIONS} | of_experts)
    if vocab_size is not None and shape.vocab_size < vocab_size:
        raise UserError(
            f"{directory} has a vocabulary of {shape.vocab_size}, below the {vocab_size} of the token store; "
            f"prepare the store with its tokenizer: wlb prepare --tokenizer {directory}"
        )
    return shape


def has_tied_embeddings(model: ModelConfig) -> bool:
    """Whether the output head shares the matrix of the embedding; ``[model]`` may untie them in a pretrained model.

    Raises ``UserError`` if ``[model]`` ties a head that is not tied in the pretrained model.
    """
    if model.pretrained is None:
        return model.tied_embeddings
    tied = flag(read_config_json(model.pretrained), "tie_word_embeddings")
    if model.tied_embeddings and not tied:
        raise UserError(
            f"model.tied_embeddings = true, but {model.pretrained} has a head of its own; leave model.tied_embeddings "
            "out"
        )
    return model.tied_embeddings if "tied_embeddings" in model.model_fields_set else tied


def refuse_changes(model: ModelConfig, found: Mapping[str, Any]) -> None:
    """Raise ``UserError`` if ``[model]`` gives another value than was ``found`` in the pretrained model."""
    for name, value in found.items():
        if name in model.model_fields_set and getattr(model, name) not in (None, value):
            raise UserError(
                f"model.{name} = {getattr(model, name)}, but {model.pretrained} has {value}; leave model.{name} out"
            )


def _preset_shape(model: ModelConfig, vocab_size: int | None) -> ModelShape:
    given = {name: value for name in _DIMENSIONS if (value := getattr(model, name)) is not None}
    if vocab_size is not None:
        asked = given.setdefault("vocab_size", vocab_size)
        if asked < vocab_size:
            raise UserError(f"model.vocab_size = {asked} is below the {vocab_size} of the token store; raise it")
    shape = replace(model_shape(model.name), **given)
    shape = replace(shape, experts=_experts(model, shape.experts))
    if "head_dim" not in given and ("hidden" in given or "heads" in given):
        if shape.hidden % (2 * shape.heads):
            raise UserError(
                f"model.hidden = {shape.hidden} must be a multiple of 2 x model.heads = {2 * shape.heads}: rotary "
                "positions pair the dimensions of a head"
            )
        shape = replace(shape, head_dim=shape.hidden // shape.heads)
    return shape


def _experts(model: ModelConfig, preset: Experts | None) -> Experts | None:
    given: dict[str, Any] = {n: value for n, key in _EXPERTS.items() if (value := getattr(model, key)) is not None}
    missing = [_EXPERTS[name] for name in ("count", "active", "ffn_hidden") if name not in given]
    if preset is None and given and missing:
        raise UserError(f"a mixture of experts needs model.{missing[0]}; give it, or name a preset with experts")
    if preset is not None:
        return replace(preset, **given)
    return Experts(**given) if given else None


def check_divisible(shape: ModelShape, tp: int) -> None:
    """Raise ``UserError`` unless ``tp`` divides the sizes of the model; ``Costs`` checks its heads."""
    sizes = {"ffn_hidden": shape.ffn_hidden, "vocab_size": shape.vocab_size}
    if shape.experts is not None:
        sizes |= {f"experts.{name}": getattr(shape.experts, name) for name in ("count", "shared_hidden")}
    for name, size in sizes.items():
        if size % tp:
            more = f" or a vocab_size of {size + tp - size % tp}" if name == "vocab_size" else ""
            raise UserError(
                f"model {name} = {size} cannot be split over tp = {tp} ranks; choose a divisor of {size}{more}"
            )
