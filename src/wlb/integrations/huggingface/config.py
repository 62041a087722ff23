"""``config.json`` of a Hugging Face directory, to and from a ``TransformerConfig``.

Read are the families whose mathematics ``wlb.training.model`` has: Llama, Qwen2 (biases in the q, k and v projections)
and Qwen3 (normalised queries and keys). Whatever would make the model compute something else is refused by name, never
ignored. Keys that are absent have the defaults of ``transformers``' classes. Written are the keys that every version of
``transformers`` reads (``rope_theta`` and ``rope_scaling`` rather than ``rope_parameters``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wlb.errors import UserError
from wlb.training.model import TransformerConfig
from wlb.training.rotary import RotaryScaling
from wlb.workload.model_shapes import ModelShape

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# What the classes of transformers assume where config.json does not say.
_ROPE_THETA = 10_000.0
_NORM_EPS = 1e-6
_QWEN3_HEAD_DIM = 128
_SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config_json(directory: Path) -> dict[str, Any]:
    """The contents of ``config.json``. Raises ``UserError`` if it is missing or no JSON object."""
    path = directory / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{directory} holds no config.json; name the directory of a Hugging Face model") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} is no JSON object; name the directory of a Hugging Face model")
    return document


def read_config(directory: Path) -> TransformerConfig:
    """The model that ``directory/config.json`` describes. Raises ``UserError`` for one that we do not compute."""
    document = read_config_json(directory)
    try:
        return _from_json(document)
    except KeyError as error:
        raise UserError(f"{directory}/config.json has no {error.args[0]}; complete it") from None
    except UserError as error:
        raise UserError(f"{directory}/config.json: {error}") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{directory}/config.json has a value of the wrong type ({error}); correct it") from None


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


def _from_json(document: Mapping[str, Any]) -> TransformerConfig:
    family = document["model_type"]
    if family not in _CLASSES:
        raise UserError(f"model_type {family!r} is not supported; choose a model of {', '.join(_CLASSES)}")
    _check_supported(document)
    hidden, heads = int(document["hidden_size"]), int(document["num_attention_heads"])
    kv_heads = document.get("num_key_value_heads") if family == "llama" else document["num_key_value_heads"]
    head_dim = document.get("head_dim") or (_QWEN3_HEAD_DIM if family == "qwen3" else hidden // max(heads, 1))
    theta, scaling = _rotary(document)
    return TransformerConfig(
        ModelShape(
            hidden=hidden,
            layers=int(document["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(kv_heads or heads),
            head_dim=int(head_dim),
            ffn_hidden=int(document["intermediate_size"]),
            vocab_size=int(document["vocab_size"]),
        ),
        rope_theta=theta,
        norm_eps=float(document.get("rms_norm_eps", _NORM_EPS)),
        rope_scaling=scaling,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_embeddings=bool(document.get("tie_word_embeddings", False)),
    )


def _check_supported(document: Mapping[str, Any]) -> None:
    sliding = document.get("use_sliding_window") or set(document.get("layer_types") or ()) - {"full_attention"}
    refused = {
        "hidden_act": document.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(document.get("attention_bias")),
        "mlp_bias": bool(document.get("mlp_bias")),
        "use_sliding_window": bool(sliding),
        "quantization_config": document.get("quantization_config") is not None,
        "partial_rotary_factor": _rope(document).get("partial_rotary_factor", 1.0) != 1.0,
    }
    for key, is_refused in refused.items():
        if is_refused:
            shown = f" = {value!r}" if isinstance(value := document.get(key), str | bool) else ""
            raise UserError(f"{key}{shown} is not supported; choose another model")


def _rope(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Everything about rotary positions, whether it stands in one object (transformers 5) or beside the others."""
    top = {key: document[key] for key in ("rope_theta", "partial_rotary_factor") if document.get(key) is not None}
    return top | (document.get("rope_scaling") or {}) | (document.get("rope_parameters") or {})


def _rotary(document: Mapping[str, Any]) -> tuple[float, RotaryScaling | None]:
    rope = _rope(document)
    theta = float(rope.get("rope_theta", _ROPE_THETA))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"rope_type {kind!r} is not supported; choose a model with 'default' or 'llama3'")
    factor, low, high, original = (rope[key] for key in _SCALING_KEYS)
    if not 0 < low < high:
        raise UserError(f"low_freq_factor {low} and high_freq_factor {high} are no interval; correct them")
    return theta, RotaryScaling(float(factor), float(low), float(high), int(original))
