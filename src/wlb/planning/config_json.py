"""``config.json`` of a Hugging Face directory, to and from a ``TransformerConfig``.

Read are the families whose mathematics ``wlb.models.transformer`` has: Llama, Qwen2 (biases in the q, k and v
projections) and Qwen3 (normalised queries and keys). Types and bounds are strict, and whatever would make the model
compute something else is refused by name, never ignored; what the family's class in ``transformers`` does not read
means nothing here either. Keys that are absent have the defaults of those classes. Written are the keys that every
version of ``transformers`` reads (``rope_theta`` and ``rope_scaling`` rather than ``rope_parameters``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wlb.config import Number, PositiveInt, RopeScalingConfig
from wlb.errors import UserError
from wlb.planning.model import RotaryScaling, TransformerConfig
from wlb.workload.model_json import read_config_json
from wlb.workload.shapes import ModelShape

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_QWEN3_HEAD_DIM = 128  # where config.json does not say
_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")  # beside the others, or in one object with the scaling


class _Strict(BaseModel):
    """``"false"`` is no boolean, 32.7 no integer, and true no number."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class _ConfigJson(_Strict):
    """What is read of ``config.json``, with the defaults of ``transformers``."""

    model_type: str
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: Annotated[Number, Field(gt=0)] = 1e-6
    tie_word_embeddings: bool = False
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    # What follows is refused where it says anything else; see _check_supported.
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_dropout: Number | None = None
    mlp_bias: bool = False
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    quantization_config: Any = None


class _Rope(_Strict):
    """Rotary positions without scaling; other keys would be a scaling, or one for some of the layers."""

    model_config = ConfigDict(extra="forbid")

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[Number, Field(ge=1)] = 10_000.0
    partial_rotary_factor: Number = 1.0


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
    ``UserError`` for a model with both biases and q/k norms: no family has them.
    """
    shape = config.shape
    if config.qkv_bias and config.qk_norm:
        raise UserError("no Hugging Face family has both model.qkv_bias and model.qk_norm; train with one of them")
    family = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    scaling = config.rope_scaling
    return {
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
        "rope_scaling": {"rope_type": "llama3", **asdict(scaling)} if scaling else None,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": dtype,
    }


def _mistake(error: ValidationError) -> str:
    problem = error.errors()[0]
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f" has no {name}; complete it"
    if problem["type"] == "extra_forbidden":
        return f": {name} is not supported for rotary positions; choose another model"
    if not name:
        return f": {problem['msg'].removeprefix('Value error, ')}"
    return f": {name}: {problem['msg'].removeprefix('Value error, ')} (got {problem['input']!r})"


def _from_json(document: Mapping[str, Any]) -> TransformerConfig:
    if (family := document.get("model_type", "llama")) not in list(_CLASSES):  # other families have other keys
        raise UserError(f"model_type {family!r} is not supported; choose a model of {', '.join(_CLASSES)}")
    document = {name: value for name, value in document.items() if value is not None}  # null is the default
    described = _ConfigJson.model_validate(document)
    _check_supported(described)
    if family != "llama" and "num_key_value_heads" not in document:  # its default is that of one size of the family
        raise UserError("num_key_value_heads is missing; complete it")
    theta, scaling = _rotary(document, described)
    return TransformerConfig(
        ModelShape(
            hidden=described.hidden_size,
            layers=described.num_hidden_layers,
            heads=described.num_attention_heads,
            kv_heads=described.num_key_value_heads or described.num_attention_heads,
            head_dim=described.head_dim or (_QWEN3_HEAD_DIM if family == "qwen3" else _even_share(described)),
            ffn_hidden=described.intermediate_size,
            vocab_size=described.vocab_size,
        ),
        rope_theta=theta,
        norm_eps=described.rms_norm_eps,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_embeddings=described.tie_word_embeddings,
    )


def _even_share(described: _ConfigJson) -> int:
    """The width of a head that is not given."""
    head_dim, rest = divmod(described.hidden_size, described.num_attention_heads)
    if rest:
        raise UserError(
            f"hidden_size = {described.hidden_size} is no multiple of num_attention_heads = "
            f"{described.num_attention_heads}, and there is no head_dim; correct them"
        )
    return head_dim


def _check_supported(described: _ConfigJson) -> None:
    if described.attention_dropout:
        raise UserError(
            f"attention_dropout = {described.attention_dropout} is not supported; set it to 0 to train without dropout"
        )
    refused = {
        "hidden_act": described.hidden_act != "silu",
        "attention_bias": described.attention_bias,
        "mlp_bias": described.mlp_bias,
        "use_sliding_window": described.use_sliding_window,
        "layer_types": bool(set(described.layer_types or ()) - {"full_attention"}),
        "quantization_config": described.quantization_config is not None,
    }
    for key, is_refused in refused.items():
        if is_refused:
            shown = f" = {value!r}" if isinstance(value := getattr(described, key), str | bool) else ""
            raise UserError(f"{key}{shown} is not supported; choose another model")


def _rotary(document: Mapping[str, Any], described: _ConfigJson) -> tuple[float, RotaryScaling | None]:
    """Base and scaling, whether all of it stands in one object (transformers 5) or some of it beside the others."""
    old, new = described.rope_scaling or {}, described.rope_parameters or {}
    beside = {key: document[key] for key in _ROPE_KEYS if document.get(key) is not None}
    rope = beside | old | new
    for part in (beside, old):
        for key, value in part.items():
            if rope[key] != value:
                raise UserError(f"{key} is given twice, as {value!r} and as {rope[key]!r}; keep one of them")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"rope_type {kind!r} is not supported; choose a model with 'default' or 'llama3'")
    if rope.get("type", kind) != kind:
        raise UserError(f"rope_type {kind!r} and type {rope['type']!r} differ; keep one of them")
    stretch = {key: rope.pop(key) for key in RopeScalingConfig.model_fields if kind == "llama3" and key in rope}
    plain = _Rope.model_validate(rope)
    if plain.partial_rotary_factor != 1:
        raise UserError(f"partial_rotary_factor = {plain.partial_rotary_factor} is not supported; choose another model")
    if kind == "default":
        return plain.rope_theta, None
    if missing := [key for key in RopeScalingConfig.model_fields if key not in stretch]:
        raise UserError(f"rope_type 'llama3' has no {missing[0]}; complete it")
    return plain.rope_theta, RotaryScaling(**RopeScalingConfig.model_validate(stretch).model_dump())
