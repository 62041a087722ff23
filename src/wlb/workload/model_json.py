"""``config.json`` of a Hugging Face directory: read for a model's shape, or for all that training needs, and written.

Families whose shape can be priced are ``FAMILIES``; those that can be trained are the ones whose mathematics
``wlb.models.transformer`` has. Keys that are absent or null have the defaults of the model's class in ``transformers``,
where that class has one default for models of all sizes; what that class does not read means nothing here either, and
where keys disagree, ``layer_types`` decides, as there. Types are strict, and whatever would make the model compute
something else is refused by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from wlb.errors import UserError
from wlb.workload.model import ROPE_REQUIRED, RopeScalingConfig, TransformerConfig, yarn_length
from wlb.workload.shapes import Experts, LatentAttention, ModelShape

Keys = Mapping[str, Any]
T = TypeVar("T")

# What their classes in transformers take where config.json does not say.
FAMILIES: dict[str, dict[str, int | None]] = {
    "llama": {},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "mistral": {"sliding_window": 4096},  # with layer_types, transformers makes a Ministral of it
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"sliding_window": 4096},
    "deepseek_v3": {},
    "kimi_k2": {},
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
}
_TRAINED = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Keys of the number of experts and of their width.
_EXPERTS = {
    **dict.fromkeys(("mixtral", "gpt_oss"), ("num_local_experts", "intermediate_size")),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), ("n_routed_experts", "moe_intermediate_size")),
}
_NO_LAYER_TYPES = ("mixtral", "qwen3_moe")  # have windows, and read no layer_types
_BIASED = ("llama", "qwen3")  # read attention_bias
_COMPUTED = {"hidden_act": "silu", "mlp_bias": False, "attention_dropout": 0, "quantization_config": None}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_config_json(path: Path) -> dict[str, Any]:
    """The contents of ``config.json``, in the directory ``path`` or at it.

    Raises ``UserError`` if it is missing or no JSON object.
    """
    directory, path = path, path if path.is_file() else path / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{directory} holds no config.json; name the directory of a Hugging Face model") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a JSON object; name the directory of a Hugging Face model")
    return document


def read_shape(path: Path) -> ModelShape:
    """The shape of the model in the directory ``path``, or of the ``config.json`` at it.

    Raises ``UserError`` for a model that is not priced, and for one that is not described in full.
    """

    def priced(document: Keys) -> ModelShape:
        document = language_model(document)
        if (family := document.get("model_type")) not in list(FAMILIES):  # it may be anything
            raise UserError(f"model_type {family!r} is not priced; choose a model of {', '.join(FAMILIES)}")
        return shape_of(document)

    return _read(path, priced)


def read_config(path: Path) -> TransformerConfig:
    """The model that ``config.json`` describes, in the directory ``path`` or at it.

    Raises ``UserError`` for one that we do not compute.
    """
    return _read(path, _trained)


def _read(path: Path, described: Callable[[Keys], T]) -> T:
    document = read_config_json(path)
    try:
        return described(document)
    except UserError as error:
        raise UserError(f"{path if path.is_file() else path / 'config.json'}: {error}") from None


def language_model(document: Keys) -> Keys:
    """``document``, or the part on text of that of a model that also sees."""
    text = document.get("text_config")
    return text if isinstance(text, dict) else document


def to_config_json(config: TransformerConfig, *, longest: int, dtype: str) -> dict[str, Any]:
    """``config.json`` of the first family that computes the same as ``config``, for any version of ``transformers``.

    ``longest`` is the context in tokens and ``dtype`` the type of the weights, by its name in torch. Raises
    ``UserError`` for biases, q/k norms and windows that no family has together.
    """
    shape, scaling = config.shape, config.rope_scaling
    for family, model_class in _TRAINED.items():
        window = {} if shape.sliding_window is None else {"sliding_window": shape.sliding_window}
        if window and family != "mistral":
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
        }
        if _trained(document) == config:
            return document
    parts = [name for name in ("qkv_bias", "o_bias", "qk_norm") if getattr(config, name)]
    parts += [name for name in ("sliding_window", "full_attention_layers") if getattr(shape, name)]
    has = ", ".join(f"model.{name}" for name in parts)
    raise UserError(f"no Hugging Face family has together {has}; train with less of it")


def shape_of(document: Keys) -> ModelShape:
    """The shape that the keys of ``config.json`` give; a family that is not priced is read as a dense decoder.

    Raises ``UserError`` for keys that are missing, that are not sizes, and that describe what is not priced.
    """
    family: str = document["model_type"]
    given = {name: value for name, value in document.items() if value is not None or name == "sliding_window"}
    keys = FAMILIES.get(family, {}) | given
    hidden, heads = _size(keys, "hidden_size"), _size(keys, "num_attention_heads")
    latent = None
    if family in ("deepseek_v3", "kimi_k2"):
        latent = LatentAttention(
            q_rank=_size(keys, "q_lora_rank", 0, least=0),
            kv_rank=_size(keys, "kv_lora_rank"),
            rope_dim=_size(keys, "qk_rope_head_dim"),
            value_dim=_size(keys, "v_head_dim"),
        )
        head_dim = _size(keys, "qk_nope_head_dim") + latent.rope_dim
    elif "head_dim" not in keys and hidden % heads:
        raise UserError(
            f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, and there is no head_dim; "
            "complete it"
        )
    else:
        head_dim = _size(keys, "head_dim", hidden // heads)
    # Classes other than Llama's have the default of one size of the family.
    kv_heads = _size(keys, "num_key_value_heads", None if family in FAMILIES.keys() - {"llama"} else heads)
    shape = ModelShape(
        hidden=hidden,
        layers=_size(keys, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=_size(keys, "intermediate_size"),
        head_dim=head_dim,
        vocab_size=_size(keys, "vocab_size"),
        experts=_experts(keys) if family in _EXPERTS else None,
        latent=latent,
    )
    return _with_windows(shape, keys) if "sliding_window" in FAMILIES.get(family, {}) else shape


def _experts(keys: Keys) -> Experts:
    count, width = _EXPERTS[keys["model_type"]]
    if count not in keys:
        count = "num_local_experts"  # as transformers 5 writes Qwen's
    for name in ("decoder_sparse_step", "moe_layer_freq"):
        if _size(keys, name, 1) != 1:
            raise UserError(f"{name} = {keys[name]} is not priced; choose another model")
    dense = keys.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != [*range(len(dense))]:
        raise UserError(f"mlp_only_layers = {dense} is not priced; only the first layers may be dense")
    return Experts(
        _size(keys, count),
        _size(keys, "num_experts_per_tok"),
        _size(keys, width),
        shared_hidden=_size(keys, width) * _size(keys, "n_shared_experts", 0, least=0),
        dense_layers=_size(keys, "first_k_dense_replace", len(dense), least=0),
        biased=keys["model_type"] == "gpt_oss",
    )


def _with_windows(shape: ModelShape, keys: Keys) -> ModelShape:
    """``shape`` with a window in the blocks of which ``layer_types`` says so, or else the keys of its family."""
    family = keys["model_type"]
    unused = family.startswith("qwen") and not _flag(keys, "use_sliding_window")
    window = None if unused or keys["sliding_window"] is None else _size(keys, "sliding_window")
    types = None if family in _NO_LAYER_TYPES else keys.get("layer_types")
    if types is None:
        every = {"gemma3_text": _size(keys, "sliding_window_pattern", 6), "gpt_oss": 2}.get(family)
        full = _size(keys, "max_window_layers", least=0) if "max_window_layers" in FAMILIES[family] else 0
        if every is not None:
            types = [_SLIDING if (layer + 1) % every else _FULL for layer in range(shape.layers)]
        else:
            types = [_FULL if window is None or layer < full else _SLIDING for layer in range(shape.layers)]
    unknown = [name for name in types if name not in (_FULL, _SLIDING)] if isinstance(types, list) else [types]
    if unknown:
        raise UserError(f"layer_types has {unknown[0]!r}, which is not supported; choose another model")
    if len(types) != shape.layers:
        raise UserError(
            f"layer_types has {len(types)} types for num_hidden_layers = {shape.layers}; correct one of them"
        )
    if _SLIDING not in types:
        return shape
    if window is None:
        raise UserError(
            f"layer_types has {_SLIDING}, but there is no window by sliding_window and use_sliding_window; correct one "
            "of them"
        )
    first = types.index(_SLIDING)
    if _FULL not in types[first:]:
        return replace(shape, sliding_window=window, full_attention_layers=first or None)
    every = types.index(_FULL) + 1
    if any((name == _FULL) != ((layer + 1) % every == 0) for layer, name in enumerate(types)):
        raise UserError(f"layer_types does not repeat every {every} layers; choose another model")
    return replace(shape, sliding_window=window, full_attention_every=every)


def _trained(document: Keys) -> TransformerConfig:
    if (family := document.get("model_type")) not in list(_TRAINED):  # other families have other keys
        raise UserError(f"model_type {family!r} is not supported; choose a model of {', '.join(_TRAINED)}")
    for name, computed in _COMPUTED.items():
        if document.get(name) not in (None, computed):
            raise UserError(
                f"{name} = {document[name]!r} is not supported, only {computed!r}; change it or choose another model"
            )
    shape = shape_of(document)
    if shape.full_attention_every is not None or (family == "mistral" and shape.full_attention_layers is not None):
        raise UserError(
            "layer_types is supported where full_attention comes first and sliding_attention follows, and of mistral "
            "where all layers have one type; choose another model"
        )
    _size(document, "max_position_embeddings", 2048)  # ``wlb export`` reads it
    theta, scaling = _rotary(document)
    biased = _flag(document, "attention_bias") and family in _BIASED
    return TransformerConfig(
        shape,
        rope_theta=theta,
        norm_eps=_number(document, "rms_norm_eps", 1e-6),
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or biased,
        o_bias=biased,
        qk_norm=family == "qwen3",
        tied_embeddings=_flag(document, "tie_word_embeddings"),
    )


def _rotary(document: Keys) -> tuple[float, RopeScalingConfig | None]:
    """Base and scaling, whether all of it stands in one object (transformers 5) or some of it beside the others."""
    rope: dict[str, Any] = {}
    beside = {name: document.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    for name, part in [("", beside), *((name, document.get(name)) for name in ("rope_scaling", "rope_parameters"))]:
        if not isinstance(part, dict | None):
            raise UserError(f"{name} = {part!r} is not an object; correct it")
        for given, value in (part or {}).items():
            key = "rope_type" if given == "type" else given  # as it was named first
            if value is not None and key in rope and rope[key] != value:
                raise UserError(f"{key} is given twice, as {rope[key]!r} and as {value!r}; keep one of them")
            if value is not None:
                rope[key] = value
    theta = _number(rope, "rope_theta", 10_000.0)
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
    _size(rope, "original_max_position_embeddings", 1)  # a file of settings may say "8K"
    # DeepSeek's way to say yarn's attention_factor.
    scales = [_number(rope, name, 0) for name in ("mscale", "mscale_all_dim")] if kind == "yarn" else []
    settings = {name: value for name, value in rope.items() if not scales or not name.startswith("mscale")}
    scaling = RopeScalingConfig.of(settings, "rope_scaling", strict=True)
    if scales and all(scales) and scaling.attention_factor is None:
        above, below = (yarn_length(scaling.factor, scale) for scale in scales)
        scaling = scaling.changed(attention_factor=above / below)
    return theta, scaling


def _size(keys: Keys, name: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number; null is the default."""
    value = default if keys.get(name) is None else keys[name]
    if value is None:
        raise UserError(f"there is no {name}; complete it")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} = {value!r} is not a whole number of at least {least}; correct it")
    return value


def _number(keys: Keys, name: str, default: float) -> float:
    value = default if keys.get(name) is None else keys[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise UserError(f"{name} = {value!r} is not a finite number of at least 0; correct it")
    return float(value)


def _flag(keys: Keys, name: str) -> bool:
    value = keys.get(name)
    if not isinstance(value, bool | None):
        raise UserError(f"{name} = {value!r} is neither true nor false; correct it")
    return bool(value)
