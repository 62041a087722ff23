"""The shape of a Hugging Face model, from its ``config.json``.

This is the only reader of sizes, and of which blocks have windows or experts. What the trainer needs
beside the shape, and what it refuses, is in ``wlb.job.config_json``, which takes the shape from here.
Keys that are absent have the defaults of the model's class in ``transformers``, where that class has one default for
models of all sizes. Where keys disagree, ``layer_types`` decides, as there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from wlb.errors import UserError
from wlb.workload.shapes import Experts, LatentAttention, ModelShape

Keys = Mapping[str, Any]

# Where config.json does not say.
_HEAD_DIMS = {"qwen3": 128, "gemma3_text": 256, "gpt_oss": 64}
_GEMMA3 = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}
_WINDOW, _GPT_OSS_WINDOW, _QWEN_FULL = 4096, 128, 28  # sliding_window, and Qwen's max_window_layers
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
    document = read_config_json(path)
    try:
        family = language_model(document).get("model_type")
        if family not in list(FAMILIES):  # it may be anything
            raise UserError(f"model_type {family!r} is not priced; choose a model of {', '.join(FAMILIES)}")
        return FAMILIES[family](language_model(document))
    except UserError as error:
        raise UserError(f"{path if path.is_file() else path / 'config.json'}: {error}") from None


def language_model(document: Keys) -> Keys:
    """``document``, or the part on text of that of a model that also sees."""
    text = document.get("text_config")
    return text if isinstance(text, dict) else document


def dense(document: Keys, *, head_dim: int | None = None, **variant: Any) -> ModelShape:
    """The shape of a decoder whose blocks are all alike: full attention, and one feed-forward network."""
    heads = _size(document, "num_attention_heads")
    one_size = document["model_type"] in FAMILIES.keys() - {"llama"}  # whose class has that of one size of the family
    return ModelShape(
        hidden=_size(document, "hidden_size"),
        layers=_size(document, "num_hidden_layers"),
        heads=heads,
        kv_heads=_size(document, "num_key_value_heads", None if one_size else heads),
        ffn_hidden=_size(document, "intermediate_size"),
        head_dim=head_dim or _head_dim(document),
        vocab_size=_size(document, "vocab_size"),
        **variant,
    )


def _head_dim(document: Keys) -> int:
    hidden, heads = _size(document, "hidden_size"), _size(document, "num_attention_heads")
    default = _HEAD_DIMS.get(document["model_type"])
    if default is None and document.get("head_dim") is None and hidden % heads:
        raise UserError(
            f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, and there is no head_dim; "
            "complete it"
        )
    return _size(document, "head_dim", default or hidden // heads)


def _mistral(document: Keys) -> ModelShape:
    window = _window(document, _WINDOW)  # with layer_types, transformers makes a Ministral of it
    return _with_windows(dense(document), document, window, lambda layer: window is not None)


def _mixtral(document: Keys) -> ModelShape:
    experts = _experts(document, "num_local_experts", "intermediate_size")
    return dense(document, experts=experts, sliding_window=_window(document, None))


def _qwen(document: Keys) -> ModelShape:
    window, first = _qwen_window(document), _size(document, "max_window_layers", _QWEN_FULL, least=0)
    return _with_windows(dense(document), document, window, lambda layer: window is not None and layer >= first)


def _qwen_window(document: Keys) -> int | None:
    used = document.get("use_sliding_window")
    if used not in (None, True, False):
        raise UserError(f"use_sliding_window = {used!r} is neither true nor false; correct it")
    return _window(document, _WINDOW) if used else None


def _qwen_moe(document: Keys) -> ModelShape:
    if _size(document, "decoder_sparse_step", 1) != 1:
        raise UserError(f"decoder_sparse_step = {document['decoder_sparse_step']} is not priced; choose another model")
    first = document.get("mlp_only_layers") or []
    if not isinstance(first, list) or first != [*range(len(first))]:
        raise UserError(f"mlp_only_layers = {first} is not priced; only the first layers may be dense")
    experts = _experts(
        document,
        "num_experts" if "num_experts" in document else "num_local_experts",  # as transformers 5 writes it
        "moe_intermediate_size",
        dense_layers=len(first),
    )
    return dense(document, experts=experts, sliding_window=_qwen_window(document))


def _deepseek(document: Keys) -> ModelShape:
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


def _gemma3(document: Keys) -> ModelShape:
    document = _GEMMA3 | dict(document)
    every = _size(document, "sliding_window_pattern", 6)
    window = _window(document, _WINDOW)
    return _with_windows(dense(document), document, window, lambda layer: (layer + 1) % every != 0)


def _gpt_oss(document: Keys) -> ModelShape:
    shape = dense(document, experts=_experts(document, "num_local_experts", "intermediate_size", biased=True))
    return _with_windows(shape, document, _window(document, _GPT_OSS_WINDOW), lambda layer: (layer + 1) % 2 != 0)


def _experts(document: Keys, count: str, width: str, *, biased: bool = False, **more: int) -> Experts:
    """Experts whose number and width have these names."""
    active = _size(document, "num_experts_per_tok")
    return Experts(_size(document, count), active, _size(document, width), biased=biased, **more)


FAMILIES: dict[str, Callable[[Keys], ModelShape]] = {
    "llama": dense,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen_moe,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
}


def _window(document: Keys, default: int | None) -> int | None:
    """Tokens that blocks with a window attend; null is no window."""
    return None if document.get("sliding_window", default) is None else _size(document, "sliding_window", default)


def _with_windows(shape: ModelShape, document: Keys, window: int | None, slides: Callable[[int], bool]) -> ModelShape:
    """``shape`` with a window in the blocks of which ``layer_types`` says so, or else ``slides`` of their number."""
    types = _layer_types(document, shape.layers, slides)
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
    return replace(shape, sliding_window=window, full_attention_every=_period(types))


def _layer_types(document: Keys, layers: int, slides: Callable[[int], bool]) -> list[str]:
    """Of every block whether its attention is full or has a window; ``layer_types`` says so, if given."""
    types = document.get("layer_types")
    if types is None:
        return [_SLIDING if slides(layer) else _FULL for layer in range(layers)]
    unknown = [name for name in types if name not in (_FULL, _SLIDING)] if isinstance(types, list) else [types]
    if unknown:
        raise UserError(f"layer_types has {unknown[0]!r}, which is not supported; choose another model")
    if len(types) != layers:
        raise UserError(f"layer_types has {len(types)} types for num_hidden_layers = {layers}; correct one of them")
    return [str(name) for name in types]


def _period(types: list[str]) -> int:
    """Every so many blocks one has full attention, and all between have not."""
    every = types.index(_FULL) + 1 if _FULL in types else len(types) + 1
    if any((name == _FULL) != ((layer + 1) % every == 0) for layer, name in enumerate(types)):
        raise UserError(f"layer_types does not repeat every {every} layers; choose another model")
    return every


def _size(document: Keys, name: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number; null is the default."""
    value = document.get(name)
    value = default if value is None else value
    if value is None:
        raise UserError(f"there is no {name}; complete it")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} = {value!r} is not a whole number of at least {least}; correct it")
    return value
