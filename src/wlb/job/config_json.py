"""``config.json`` of a Hugging Face directory, to and from a ``TransformerConfig``.

It reads the families whose mathematics ``wlb.models.transformer`` has: Llama, Mistral (a sliding window), Qwen2 (biases
in the q, k and v projections) and Qwen3 (normalised queries and keys). ``wlb.workload.model_json`` reads the shape, and
this the rest. Types and bounds are strict, and whatever would make the model compute something else is refused by name,
never ignored; what the family's class in ``transformers`` does not read means nothing here either. Keys that are absent
have the defaults of those classes. It writes the keys that every version of ``transformers`` reads (``rope_theta`` and
``rope_scaling`` rather than ``rope_parameters``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wlb.errors import UserError
from wlb.job.config import Number, PositiveInt, RopeScalingConfig
from wlb.job.model import SCALINGS, Scaling, TransformerConfig, scaling_json, scaling_of, yarn_length
from wlb.settings import plainly
from wlb.workload.model_json import FAMILIES, read_config_json
from wlb.workload.shapes import ModelShape

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_BIASED = ("llama", "qwen3")  # families that read attention_bias
_MSCALE = ("mscale", "mscale_all_dim")  # DeepSeek's way to say yarn's attention_factor
_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")  # beside the others, or in one object with the scaling


class _Strict(BaseModel):
    """``"false"`` is no boolean, 32.7 no integer, and true no number."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class _ConfigJson(_Strict):
    """What is read of ``config.json`` beside the shape, with the defaults of ``transformers``."""

    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: Annotated[Number, Field(gt=0)] = 1e-6
    tie_word_embeddings: bool = False
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    # What follows is refused where it says anything else; see _check_supported.
    hidden_act: str = "silu"
    attention_dropout: Number | None = None
    mlp_bias: bool = False
    layer_types: list[str] | None = None
    quantization_config: Any = None


class _Rope(_Strict):
    """Rotary positions without scaling; other keys would be a scaling, or one for some of the layers."""

    model_config = ConfigDict(extra="forbid")

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[Number, Field(gt=1)] = 10_000.0
    partial_rotary_factor: Number = 1.0


class _Stretch(_Strict):
    """The types of a scaling's values, where JSON is stricter than a file of settings; bounds are the settings'."""

    original_max_position_embeddings: PositiveInt | None = None
    truncate: bool | None = None
    mscale: Annotated[Number, Field(ge=0)] | None = None
    mscale_all_dim: Annotated[Number, Field(ge=0)] | None = None


def read_config(directory: Path) -> TransformerConfig:
    """The model that ``directory/config.json`` describes. Raises ``UserError`` for one that we do not compute."""
    document = read_config_json(directory)
    try:
        return _from_json(document)
    except ValidationError as error:
        raise UserError(f"{directory}/config.json{_mistake(error)}") from None
    except UserError as error:
        raise UserError(f"{directory}/config.json: {error}") from None


def to_config_json(config: TransformerConfig, *, longest: int, dtype: str) -> dict[str, Any]:
    """``config.json`` of the first family that computes the same as ``config``.

    ``longest`` is the context in tokens and ``dtype`` the type of the weights, by its name in torch. Raises
    ``UserError`` for biases, q/k norms and windows that no family has together.
    """
    shape = config.shape
    family = _family(config)
    scaling = config.rope_scaling
    return {
        **_window_keys(config, family),
        **({"attention_bias": config.o_bias} if family in _BIASED else {}),
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_hidden,
        "vocab_size": shape.vocab_size,
        "hidden_act": "silu",
        "max_position_embeddings": longest,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling_json(scaling) if scaling else None,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": dtype,
    }


def _family(config: TransformerConfig) -> str:
    """The first family with the parts of ``config``."""
    biases, shape = (config.qkv_bias, config.o_bias), config.shape
    both_or_none = config.qkv_bias == config.o_bias
    if config.qk_norm and both_or_none:
        return "qwen3"
    if not config.qk_norm and both_or_none and shape.sliding_window is None:
        return "llama"
    if not config.qk_norm and biases == (False, False) and shape.full_attention_layers is None:
        return "mistral"
    if not config.qk_norm and biases == (True, False):
        return "qwen2"
    parts = [name for name in ("qkv_bias", "o_bias", "qk_norm") if getattr(config, name)]
    parts += [name for name in ("sliding_window", "full_attention_layers") if getattr(shape, name)]
    has = ", ".join(f"model.{name}" for name in parts)
    raise UserError(f"no Hugging Face family has together {has}; train with less of it")


def _window_keys(config: TransformerConfig, family: str) -> dict[str, Any]:
    window, first = config.shape.sliding_window, config.shape.full_attention_layers or 0
    if family == "mistral":
        return {"sliding_window": window}
    if family == "llama" or window is None:
        return {}
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": first}


def _mistake(error: ValidationError) -> str:
    problem = error.errors()[0]
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f": {name} is not supported for rotary positions; choose another model"
    if not name:
        return f": {plainly(problem['msg'])}"
    return f": {name}: {plainly(problem['msg'])} (got {problem['input']!r})"


def _from_json(document: Mapping[str, Any]) -> TransformerConfig:
    if (family := document.get("model_type")) not in list(_CLASSES):  # other families have other keys
        raise UserError(f"model_type {family!r} is not supported; choose a model of {', '.join(_CLASSES)}")
    shape = FAMILIES[family](document)
    document = {name: value for name, value in document.items() if value is not None}  # null is the default
    described = _ConfigJson.model_validate(document)
    _check_supported(described, shape, family)
    theta, scaling = _rotary(document, described)
    biased = described.attention_bias and family in _BIASED
    return TransformerConfig(
        shape,
        rope_theta=theta,
        norm_eps=described.rms_norm_eps,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or biased,
        o_bias=biased,
        qk_norm=family == "qwen3",
        tied_embeddings=described.tie_word_embeddings,
    )


def _check_supported(described: _ConfigJson, shape: ModelShape, family: str) -> None:
    if described.attention_dropout:
        raise UserError(
            f"attention_dropout = {described.attention_dropout} is not supported; set it to 0 to train without dropout"
        )
    refused = {
        "hidden_act": described.hidden_act != "silu",
        "mlp_bias": described.mlp_bias,
        "layer_types": bool(set(described.layer_types or ()) - {"full_attention", "sliding_attention"}),
        "quantization_config": described.quantization_config is not None,
    }
    for key, is_refused in refused.items():
        if is_refused:
            shown = f" = {value!r}" if isinstance(value := getattr(described, key), str | bool) else ""
            raise UserError(f"{key}{shown} is not supported; choose another model")
    if shape.full_attention_every is not None:
        raise UserError(
            "layer_types is supported where full_attention comes first and sliding_attention follows; choose another "
            "model"
        )
    if family == "mistral" and shape.full_attention_layers is not None:
        raise UserError("layer_types of mistral is supported where all layers have one type; choose another model")


def _rotary(document: Mapping[str, Any], described: _ConfigJson) -> tuple[float, Scaling | None]:
    """Base and scaling, whether all of it stands in one object (transformers 5) or some of it beside the others."""
    old, new = described.rope_scaling or {}, described.rope_parameters or {}
    beside = {key: document[key] for key in _ROPE_KEYS if document.get(key) is not None}
    rope = beside | old | new
    for part in (beside, old):
        for key, value in part.items():
            if rope[key] != value:
                raise UserError(f"{key} is given twice, as {value!r} and as {rope[key]!r}; keep one of them")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *SCALINGS):
        raise UserError(f"rope_type {kind!r} is not supported; choose a model with {', '.join(['default', *SCALINGS])}")
    if rope.get("type", kind) != kind:
        raise UserError(f"rope_type {kind!r} and type {rope['type']!r} differ; keep one of them")
    keys = [] if kind == "default" else fields(SCALINGS[kind])
    own = [*(key.name for key in keys), *(_MSCALE if kind == "yarn" else ())]
    stretch = {name: rope.pop(name) for name in own if name in rope}
    plain = _Rope.model_validate(rope)
    if plain.partial_rotary_factor != 1:
        raise UserError(f"partial_rotary_factor = {plain.partial_rotary_factor} is not supported; choose another model")
    if kind == "default":
        return plain.rope_theta, None
    if missing := [key.name for key in keys if key.default is MISSING and stretch.get(key.name) is None]:
        raise UserError(f"rope_type {kind!r} has no {missing[0]}; complete it")
    return plain.rope_theta, _scaling(kind, {key: value for key, value in stretch.items() if value is not None})


def _scaling(kind: str, stretch: dict[str, Any]) -> Scaling | None:
    typed = _Stretch.model_validate(stretch)
    settings = {"rope_type": kind} | {key: value for key, value in stretch.items() if key not in _MSCALE}
    section = RopeScalingConfig.model_validate(settings)
    if typed.mscale and typed.mscale_all_dim and section.attention_factor is None:
        above, below = (yarn_length(section.factor, scale) for scale in (typed.mscale, typed.mscale_all_dim))
        section = RopeScalingConfig.model_validate(settings | {"attention_factor": above / below})
    return scaling_of(section)
