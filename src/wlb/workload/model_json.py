"""The shape that ``config.json`` of a Hugging Face directory describes.

``FAMILIES`` are the families that are priced. Absent or null keys have the default of the model class in
``transformers``, if that default is the same for models of all sizes. Keys that the class does not read are ignored; if
keys disagree, ``layer_types`` decides, as in ``transformers``. Types are strict, and a key that would give another
shape is refused by name. ``wlb.models.huggingface.config_json`` reads what training needs beyond the shape.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from wlb.errors import UserError
from wlb.workload.shapes import Experts, LatentAttention, ModelShape

Keys = Mapping[str, Any]

# Defaults of their classes in transformers.
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
# Keys for the number of experts and for their width.
_EXPERTS = {
    **dict.fromkeys(("mixtral", "gpt_oss"), ("num_local_experts", "intermediate_size")),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), ("n_routed_experts", "moe_intermediate_size")),
}
_NO_LAYER_TYPES = ("mixtral", "qwen3_moe")  # have windows, but do not read layer_types
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_config_json(path: Path) -> dict[str, Any]:
    """The contents of ``config.json``; ``path`` is the file or its directory.

    Raises ``UserError`` if it is missing or not a JSON object.
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


def shape_of_config(config: Any) -> ModelShape:
    """The shape of a decoder from its configuration in ``transformers``, to price documents for it.

    A model of another family is priced as a dense decoder of its size. Raises ``UserError`` for a shape that cannot be
    priced.
    """
    renamed = {usual: getattr(config, usual, None) for usual in getattr(config, "attribute_map", ())}
    document = dict(language_model(config.to_dict() | renamed))
    if document.get("intermediate_size") is None and document.get("hidden_size"):
        document["intermediate_size"] = 4 * document["hidden_size"]  # as in GPT-2, Bloom and Falcon
    return shape_of(document)


def read_shape(path: Path) -> ModelShape:
    """The shape of the model at ``path``, a directory or its ``config.json``.

    Raises ``UserError`` for a model that is not priced or not fully described.
    """
    document = language_model(read_config_json(path))
    with naming(path):
        if (family := document.get("model_type")) not in list(FAMILIES):  # family may be of any type
            raise UserError(f"model_type {family!r} is not priced; choose a model of {', '.join(FAMILIES)}")
        return shape_of(document)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the name of the ``config.json`` in front of errors about its keys."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path if path.is_file() else path / 'config.json'}: {error}") from None


def language_model(document: Keys) -> Keys:
    """``document``, or its text part for a multimodal model."""
    text = document.get("text_config")
    return text if isinstance(text, dict) else document


def shape_of(document: Keys) -> ModelShape:
    """The shape that the keys of ``config.json`` give; another family is read as a dense decoder.

    Raises ``UserError`` for keys that are missing, are not sizes, or describe a model that is not priced.
    """
    family: str = document["model_type"]
    given = {name: value for name, value in document.items() if value is not None or name == "sliding_window"}
    keys = FAMILIES.get(family, {}) | given
    hidden, heads = size(keys, "hidden_size"), size(keys, "num_attention_heads")
    latent = None
    if family in ("deepseek_v3", "kimi_k2"):
        latent = LatentAttention(
            q_rank=size(keys, "q_lora_rank", 0, least=0),
            kv_rank=size(keys, "kv_lora_rank"),
            rope_dim=size(keys, "qk_rope_head_dim"),
            value_dim=size(keys, "v_head_dim"),
        )
        head_dim = size(keys, "qk_nope_head_dim") + latent.rope_dim
    elif "head_dim" not in keys and hidden % heads:
        raise UserError(
            f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, and there is no head_dim; "
            "complete it"
        )
    else:
        head_dim = size(keys, "head_dim", hidden // heads)
    # Classes other than Llama have the default of one model size.
    kv_heads = size(keys, "num_key_value_heads", None if family in FAMILIES.keys() - {"llama"} else heads)
    shape = ModelShape(
        hidden=hidden,
        layers=size(keys, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=size(keys, "intermediate_size"),
        head_dim=head_dim,
        vocab_size=size(keys, "vocab_size"),
        experts=_experts(keys) if family in _EXPERTS else None,
        latent=latent,
    )
    return _with_windows(shape, keys) if "sliding_window" in FAMILIES.get(family, {}) else shape


def _experts(keys: Keys) -> Experts:
    count, width = _EXPERTS[keys["model_type"]]
    if count not in keys:
        count = "num_local_experts"  # as transformers 5 writes Qwen's
    for name in ("decoder_sparse_step", "moe_layer_freq"):
        if size(keys, name, 1) != 1:
            raise UserError(f"{name} = {keys[name]} is not priced; choose another model")
    dense = keys.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != [*range(len(dense))]:
        raise UserError(f"mlp_only_layers = {dense} is not priced; only the first layers may be dense")
    return Experts(
        size(keys, count),
        size(keys, "num_experts_per_tok"),
        size(keys, width),
        shared_hidden=size(keys, width) * size(keys, "n_shared_experts", 0, least=0),
        dense_layers=size(keys, "first_k_dense_replace", len(dense), least=0),
        biased=keys["model_type"] == "gpt_oss",
    )


def _with_windows(shape: ModelShape, keys: Keys) -> ModelShape:
    """``shape`` with windows in blocks as ``layer_types`` says, or else as the keys of its family say."""
    family = keys["model_type"]
    unused = family.startswith("qwen") and not flag(keys, "use_sliding_window")
    window = None if unused or keys["sliding_window"] is None else size(keys, "sliding_window")
    types = None if family in _NO_LAYER_TYPES else keys.get("layer_types")
    if types is None:
        every = {"gemma3_text": size(keys, "sliding_window_pattern", 6), "gpt_oss": 2}.get(family)
        full = size(keys, "max_window_layers", least=0) if "max_window_layers" in FAMILIES[family] else 0
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


def size(keys: Keys, name: str, default: int | None = None, *, least: int = 1) -> int:
    """The whole number of a key, or ``default`` if the key is absent or null."""
    value = default if keys.get(name) is None else keys[name]
    if value is None:
        raise UserError(f"there is no {name}; complete it")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} = {value!r} is not a whole number of at least {least}; correct it")
    return value


def flag(keys: Keys, name: str) -> bool:
    value = keys.get(name)
    if not isinstance(value, bool | None):
        raise UserError(f"{name} = {value!r} is neither true nor false; correct it")
    return bool(value)
