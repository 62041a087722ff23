"""Read and write ``config.json`` of a Hugging Face directory, with all that training needs.

Only families that ``wlb.models.transformer`` implements can be trained. ``wlb.workload.model_json`` reads the keys of
the shape. Any key that would make the model compute something else is refused by name.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from wlb.errors import UserError
from wlb.job.config import ROPE_REQUIRED, RopeScalingConfig
from wlb.models.transformer import TransformerConfig
from wlb.workload.model_json import Keys, flag, read_from, shape_of, size
from wlb.workload.shapes import Experts

_TRAINED = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
_MIXTURES = ("qwen3_moe", "mixtral")
_BIASED = ("llama", "qwen3", "qwen3_moe")  # read attention_bias
_COMPUTED = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_dropout": 0,
    "quantization_config": None,
    "router_jitter_noise": 0,
}


def read_config(path: Path) -> TransformerConfig:
    """The model that ``config.json`` describes, in the directory ``path`` or at it.

    Raises ``UserError`` for a model that we do not implement.
    """
    return read_from(path, _trained)


def to_config_json(config: TransformerConfig, *, longest: int, dtype: str) -> dict[str, Any]:
    """``config.json`` of the first family that computes the same as ``config``, for any version of ``transformers``.

    ``longest`` is the context in tokens and ``dtype`` the torch name of the weights' type. Raises ``UserError`` for a
    combination of biases, q/k norms, windows and experts that no family has.
    """
    shape, scaling, experts = config.shape, config.rope_scaling, config.shape.experts
    for family, model_class in _TRAINED.items():
        if (family in _MIXTURES) != (experts is not None):
            continue
        window = {} if shape.sliding_window is None else {"sliding_window": shape.sliding_window}
        if window and family.startswith("qwen"):
            window |= {"use_sliding_window": True, "max_window_layers": shape.full_attention_layers or 0}
        document = {
            **window,
            **({"attention_bias": config.o_bias} if family in _BIASED else {}),
            "architectures": [model_class],
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
            "rope_scaling": None if scaling is None else scaling.in_effect,
            "tie_word_embeddings": config.tied_embeddings,
            "torch_dtype": dtype,
            **({} if experts is None else _mixture(family, experts)),
        }
        read = _trained(document)
        if family == "mixtral":  # it has no dense blocks, so their width is any
            read = replace(read, shape=replace(read.shape, ffn_hidden=shape.ffn_hidden))
        if read == config:
            return document
    parts = [name for name in ("qkv_bias", "o_bias", "qk_norm") if getattr(config, name)]
    parts += [name for name in ("sliding_window", "full_attention_layers") if getattr(shape, name)]
    if experts is not None:
        parts += ["experts", *(["router"] if config.router == "sigmoid" else [])]
        parts += ["shared_expert_hidden"] if experts.shared_hidden else []
        parts += ["first_dense_layers"] if experts.dense_layers else []
    has = ", ".join(f"model.{name}" for name in parts)
    raise UserError(f"no Hugging Face family combines {has}; train without one of them")


def _mixture(family: str, experts: Experts) -> dict[str, Any]:
    keys = {"num_experts_per_tok": experts.active}
    if family == "mixtral":
        return keys | {"num_local_experts": experts.count, "intermediate_size": experts.ffn_hidden}
    dense = {"mlp_only_layers": [*range(experts.dense_layers)], "norm_topk_prob": True}
    return keys | dense | {"num_experts": experts.count, "moe_intermediate_size": experts.ffn_hidden}


def _trained(document: Keys) -> TransformerConfig:
    if (family := document.get("model_type")) not in list(_TRAINED):  # other families have other keys
        raise UserError(f"model_type {family!r} is not supported; choose a model of {', '.join(_TRAINED)}")
    for name, computed in _COMPUTED.items():
        if document.get(name) not in (None, computed):
            raise UserError(
                f"{name} = {document[name]!r} is not supported, only {computed!r}; change it or choose another model"
            )
    if family == "qwen3_moe" and not flag(document, "norm_topk_prob"):
        raise UserError("norm_topk_prob = false is not supported, only true; change it or choose another model")
    shape = shape_of(document)
    if shape.full_attention_every is not None or (family == "mistral" and shape.full_attention_layers is not None):
        raise UserError(
            "layer_types is supported where full_attention comes first and sliding_attention follows, and of mistral "
            "where all layers have one type; choose another model"
        )
    size(document, "max_position_embeddings", 2048)  # ``wlb export`` reads it
    mixtral = family == "mixtral"
    theta, scaling = _rotary(document, default=1_000_000.0 if mixtral else 10_000.0)
    biased = flag(document, "attention_bias") and family in _BIASED
    return TransformerConfig(
        shape,
        rope_theta=theta,
        norm_eps=_number(document, "rms_norm_eps", 1e-5 if mixtral else 1e-6),
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or biased,
        o_bias=biased,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        tied_embeddings=flag(document, "tie_word_embeddings"),
    )


def _rotary(document: Keys, default: float) -> tuple[float, RopeScalingConfig | None]:
    """Base and scaling, whether they are in one object (transformers 5) or at the top level."""
    rope: dict[str, Any] = {}
    beside = {name: document.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    for name, part in [("", beside), *((name, document.get(name)) for name in ("rope_scaling", "rope_parameters"))]:
        if not isinstance(part, dict | None):
            raise UserError(f"{name} = {part!r} is not an object; correct it")
        for given, value in (part or {}).items():
            key = "rope_type" if given == "type" else given  # its earlier name
            if value is not None and key in rope and rope[key] != value:
                raise UserError(f"{key} is given twice, as {rope[key]!r} and as {value!r}; keep one")
            if value is not None:
                rope[key] = value
    theta = _number(rope, "rope_theta", default)
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise UserError("partial_rotary_factor other than 1 is not supported; choose another model")
    rope.pop("rope_theta", None)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        if other := [name for name in rope if name != "rope_type"]:
            raise UserError(f"{other[0]} is not supported for rotary positions; choose another model")
        return theta, None
    if kind not in list(ROPE_REQUIRED):
        kinds = ", ".join(["default", *ROPE_REQUIRED])
        raise UserError(f"rope_type {kind!r} is not supported; choose a model with {kinds}")
    if missing := [name for name in ROPE_REQUIRED[kind] if name not in rope]:
        raise UserError(f"rope_type {kind!r} has no {missing[0]}; complete it")
    size(rope, "original_max_position_embeddings", 1)  # a file of settings may say "8K"
    return theta, RopeScalingConfig.of(rope, "rope_scaling", strict=True)


def _number(keys: Keys, name: str, default: float) -> float:
    value = default if keys.get(name) is None else keys[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise UserError(f"{name} = {value!r} is not a finite number of at least 0; correct it")
    return float(value)
