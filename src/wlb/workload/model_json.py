"""The shape of a Hugging Face model, read from its ``config.json`` to price it.

Read is what decides what a model costs: sizes, and which blocks have windows, linear attention or experts. What the
trainer needs beside that, and what it refuses, is in ``wlb.planning.config_json``. Keys that are absent have the
defaults of the model's class in ``transformers``, where that class has one default for models of all sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wlb.errors import UserError
from wlb.workload.shapes import DeltaNet, Experts, LatentAttention, ModelShape

Document = Mapping[str, Any]

# Where config.json does not say.
_HEAD_DIMS = {"qwen3": 128, "qwen3_next": 256, "gemma3_text": 256, "gpt_oss": 64}
_GEMMA3 = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}
_WINDOW, _QWEN_FULL = 4096, 28  # sliding_window, and Qwen's max_window_layers
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


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
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a JSON object; name the directory of a Hugging Face model")
    return document


def read_shape(path: Path) -> ModelShape:
    """The shape of the model in the directory ``path``, or of the ``config.json`` at it.

    Raises ``UserError`` for a model that is not priced, and for one that is not described in full.
    """
    document = read_config_json(path)
    try:
        family = language_model(document).get("model_type")
        if family not in FAMILIES:
            raise UserError(f"model_type {family!r} is not priced; choose a model of {', '.join(FAMILIES)}")
        return FAMILIES[family](language_model(document))
    except UserError as error:
        raise UserError(f"{path if path.is_file() else path / 'config.json'}: {error}") from None


def language_model(document: Document) -> Document:
    """``document``, or the part on text of that of a model that also sees."""
    text = document.get("text_config")
    return text if isinstance(text, dict) else document


def dense(document: Document, **variant: Any) -> ModelShape:
    """The shape of a decoder whose blocks are all alike: full attention, and one feed-forward network."""
    hidden, heads = _size(document, "hidden_size"), _size(document, "num_attention_heads")
    share = None if hidden % heads else hidden // heads
    head_dim = variant.pop("head_dim", None) or _size(
        document, "head_dim", _HEAD_DIMS.get(document["model_type"], share)
    )
    return ModelShape(
        hidden=hidden,
        layers=_size(document, "num_hidden_layers"),
        heads=heads,
        kv_heads=_size(document, "num_key_value_heads", heads),
        ffn_hidden=_size(document, "intermediate_size"),
        head_dim=head_dim,
        vocab_size=_size(document, "vocab_size"),
        **variant,
    )


def _mistral(document: Document) -> ModelShape:
    window = document.get("sliding_window", _WINDOW)
    return dense(document) if window is None else dense(document, **_windows(document, None))


def _mixtral(document: Document) -> ModelShape:
    windows = {} if document.get("sliding_window") is None else _windows(document, None)
    return dense(document, experts=_experts(document, "num_local_experts", "intermediate_size"), **windows)


def _qwen(document: Document, **variant: Any) -> ModelShape:
    if document.get("use_sliding_window"):
        first = min(_size(document, "max_window_layers", _QWEN_FULL, least=0), _size(document, "num_hidden_layers"))
        if first < _size(document, "num_hidden_layers"):
            window = _size(document, "sliding_window", _WINDOW)
            variant |= {"sliding_window": window, "full_attention_layers": first or None}
    return dense(document, **variant)


def _qwen_moe(document: Document, **variant: Any) -> ModelShape:
    if _size(document, "decoder_sparse_step", 1) != 1:
        raise UserError(f"decoder_sparse_step = {document['decoder_sparse_step']} is not priced; choose another model")
    dense = document.get("mlp_only_layers") or []
    if dense != [*range(len(dense))]:
        raise UserError(f"mlp_only_layers = {dense} is not priced; only the first layers may be dense")
    experts = _experts(
        document,
        "num_experts" if "num_experts" in document else "num_local_experts",  # as transformers 5 writes it
        "moe_intermediate_size",
        shared_hidden=_size(document, "shared_expert_intermediate_size", 0, least=0),
        dense_layers=len(dense),
    )
    return _qwen(document, experts=experts, **variant)


def _qwen3_next(document: Document) -> ModelShape:
    every = _size(document, "full_attention_interval", 4)
    if document.get("layer_types"):
        every = _period(document["layer_types"], _LINEAR) or 0
    net = DeltaNet(
        key_heads=_size(document, "linear_num_key_heads"),
        value_heads=_size(document, "linear_num_value_heads"),
        key_dim=_size(document, "linear_key_head_dim"),
        value_dim=_size(document, "linear_value_head_dim"),
        conv_width=_size(document, "linear_conv_kernel_dim", 4),
    )
    return _qwen_moe(document, delta_net=net, full_attention_every=every)


def _deepseek(document: Document) -> ModelShape:
    if _size(document, "moe_layer_freq", 1) != 1:
        raise UserError(f"moe_layer_freq = {document['moe_layer_freq']} is not priced; choose another model")
    width = _size(document, "moe_intermediate_size")
    rope_dim = _size(document, "qk_rope_head_dim")
    experts = _experts(
        document,
        "n_routed_experts",
        "moe_intermediate_size",
        shared_hidden=width * _size(document, "n_shared_experts", 0, least=0),
        dense_layers=_size(document, "first_k_dense_replace", 0, least=0),
    )
    latent = LatentAttention(
        q_rank=_size(document, "q_lora_rank", 0, least=0),
        kv_rank=_size(document, "kv_lora_rank"),
        rope_dim=rope_dim,
        value_dim=_size(document, "v_head_dim"),
    )
    head_dim = _size(document, "qk_nope_head_dim") + rope_dim
    return dense(document, head_dim=head_dim, experts=experts, latent=latent)


def _gemma3(document: Document) -> ModelShape:
    document = _GEMMA3 | dict(document)
    return dense(document, **_windows(document, _size(document, "sliding_window_pattern", 6)))


def _gpt_oss(document: Document) -> ModelShape:
    experts = _experts(document, "num_local_experts", "intermediate_size")
    return dense(document, experts=experts, **_windows(document, 2))


def _experts(document: Document, count: str, width: str, **more: int) -> Experts:
    """Experts whose number and width have these names."""
    active = _size(document, "num_experts_per_tok")
    return Experts(_size(document, count), active, _size(document, width), **more)


FAMILIES: dict[str, Callable[[Document], ModelShape]] = {
    "llama": dense,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen_moe,
    "qwen3_next": _qwen3_next,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
}


def _windows(document: Document, every: int | None) -> dict[str, Any]:
    """The windows of a model in which every ``every``-th block has full attention, unless ``layer_types`` differs."""
    if document.get("layer_types"):
        every = _period(document["layer_types"], _SLIDING)
        if every == 1:
            return {}
    return {"sliding_window": _size(document, "sliding_window", _WINDOW), "full_attention_every": every}


def _period(types: Any, other: str) -> int | None:
    """Every so many blocks one has full attention and all between are of the ``other`` type; None where none has."""
    unknown = set(types) - {_FULL, other} if isinstance(types, list) else {str(types)}
    if unknown:
        raise UserError(f"layer_types has {sorted(unknown)[0]!r}, which is not priced; choose another model")
    if _FULL not in types:
        return None
    every = types.index(_FULL) + 1
    if types != [_FULL if (layer + 1) % every == 0 else other for layer in range(len(types))]:
        raise UserError(f"layer_types does not repeat every {every} layers; such a model is not priced, choose another")
    return int(every)


def _size(document: Document, name: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number; null is the default."""
    value = document.get(name)
    value = default if value is None else value
    if value is None:
        raise UserError(f"there is no {name}; complete it")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} = {value!r} is not a whole number of at least {least}; correct it")
    return value
