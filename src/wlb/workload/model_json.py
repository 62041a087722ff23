"""The shape that ``config.json`` of a Hugging Face directory describes.

Absent or null keys have the default of the model class in ``transformers``, if that default is the same for models of
all sizes. Keys that the class does not read are ignored; if keys disagree, ``layer_types`` decides, as in
``transformers``. Types are strict, and a key that would give another shape is refused by name. A family that is not in
``FAMILIES`` is read by its keys, and refused if one of them says that it is more than a decoder of the kinds read here.
``wlb.models.huggingface.config_json`` reads what training needs beyond the shape.
"""

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from wlb.errors import UserError
from wlb.workload.shapes import Experts, Indexer, LatentAttention, LinearLayer, ModelShape

Keys = Mapping[str, Any]
T = TypeVar("T")

_QWEN_HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Defaults of their classes in transformers.
FAMILIES: dict[str, dict[str, int | str | None]] = {
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
    "deepseek_v32": {},
    "glm_moe_dsa": {"index_topk_freq": 1, "index_skip_topk_offset": 2},
    **{name: {"head_dim": 256, "full_attention_interval": 4} for name in _QWEN_HYBRIDS},
    "nemotron_h": {"head_dim": 128},
    "kimi_linear": {},
    "granitemoehybrid": {"mamba_n_groups": 1, "mamba_d_head": "auto"},
    "falcon_h1": {"mamba_n_groups": 1, "mamba_d_head": "auto"},
}
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of the number of experts
_WIDE_EXPERTS = ("mixtral", "gpt_oss", "granitemoehybrid")  # as wide as intermediate_size
_UNGATED = (  # their feed-forward layer has two matrices
    *("nemotron_h", "nemotron", "arcee", "apertus", "gpt_neox", "gptj", "codegen", "gpt2", "gpt_bigcode"),
    *("opt", "bloom", "mpt", "falcon", "phi", "persimmon", "starcoder2"),
)
_LATENT = ("deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "kimi_linear")
_NO_LAYER_TYPES = ("mixtral", "qwen3_moe")  # have windows, but do not read layer_types
_DELTA = ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")
_MAMBA = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head")
# Kind of a family's linear layers; keys for heads of values, heads of keys, and their widths.
_LINEAR: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_QWEN_HYBRIDS, ("gated_delta", *_DELTA)),
    "kimi_linear": ("kda", "linear_num_heads", "linear_num_heads", "linear_head_dim", "linear_head_dim"),
    "nemotron_h": ("mamba2", "mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim"),
    **dict.fromkeys(("granitemoehybrid", "falcon_h1"), ("mamba2", *_MAMBA)),
}
_LETTERS = {"full_attention": "*", "attention": "*", "linear_attention": "M", "mamba": "M", "hybrid": "H"}
_LETTERS |= {"moe": "E", "mlp": "-"}
# Of a family that is not known, keys that give another shape unless they are read.
_SHAPES_MORE = re.compile(
    r"expert|moe_(?!router)|linear_|mamba|ssm|conv|^index|lora|(?<!max_)window|chunk|(layer|block|attn)_type|attn_layer"
    r"|attention_(layers|interval)|layer_group|pattern|hybrid|compress|^hc_|state_size|per_layer|global_|latent|_gate$"
    r"|encoder_decoder"
)
_SHARED = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
_MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", *_LATENT)  # always
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

    Warns and prices a dense decoder of its size if it cannot be priced otherwise. Raises ``UserError`` without a size.
    """
    renamed = {usual: getattr(config, usual, None) for usual in getattr(config, "attribute_map", ())}
    document = dict(language_model(config.to_dict() | renamed))
    if document.get("intermediate_size") is None and document.get("hidden_size"):
        document["intermediate_size"] = 4 * document["hidden_size"]  # as in GPT-2, Bloom and Falcon
    try:
        return shape_of(document)
    except UserError as refusal:
        dense = shape_of(document | {"model_type": "llama"})  # which reads sizes alone
        warnings.warn(f"documents are priced for a dense decoder, because {refusal}", stacklevel=2)
        return dense


def read_shape(path: Path) -> ModelShape:
    """The shape of the model at ``path``, a directory or its ``config.json``.

    Raises ``UserError`` for a model that is not priced or not fully described.
    """
    return read_from(path, lambda document: shape_of(language_model(document)))


def read_from(path: Path, read: Callable[[Keys], T]) -> T:
    """What ``read`` finds in the ``config.json`` at ``path``, whose name comes in front of errors about its keys."""
    document = read_config_json(path)
    try:
        return read(document)
    except UserError as error:
        raise UserError(f"{path if path.is_file() else path / 'config.json'}: {error}") from None


def language_model(document: Keys) -> Keys:
    """``document``, or its text part for a multimodal model."""
    text = document.get("text_config")
    return text if isinstance(text, dict) else document


class _Read(dict[str, Any]):
    """Keys, and which of them were asked for."""

    def __init__(self, keys: Keys) -> None:
        super().__init__(keys)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


def shape_of(document: Keys) -> ModelShape:
    """The shape that the keys of ``config.json`` give.

    Raises ``UserError`` for keys that are missing, are not sizes, or describe a model that is not priced.
    """
    family = document.get("model_type")
    if not isinstance(family, str):
        raise UserError(f"model_type {family!r} is not priced; choose a model of {', '.join(FAMILIES)}")
    given = {name: value for name, value in document.items() if value is not None or name == "sliding_window"}
    if isinstance(nested := document.get("linear_attn_config"), dict):  # of Kimi-Linear
        given |= {f"linear_{name}": value for name, value in nested.items()}
    keys = _Read(FAMILIES.get(family, {}) | given)
    hidden, heads = size(keys, "hidden_size"), size(keys, "num_attention_heads")
    latent = None
    if family in _LATENT or (family not in FAMILIES and keys.get("kv_lora_rank")):
        others = (size(keys, name) for name in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
        latent = LatentAttention(size(keys, "q_lora_rank", 0, least=0), *others)
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
    experts = _experts(keys)
    pattern = _pattern(keys, experts) if family in _LINEAR else None
    counted = family == "nemotron_h" and pattern  # where num_hidden_layers also counts feed-forward layers
    layers = len(re.sub("[E-]", "", counted)) if counted else size(keys, "num_hidden_layers")
    # Some models of Granite have no other feed-forward layer than the shared expert, and some mixtures no dense one.
    width = "shared_intermediate_size" if family == "granitemoehybrid" else "intermediate_size"
    of_token = experts.active * experts.ffn_hidden if experts is not None and not experts.dense_layers else None
    shape = ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=size(keys, width, of_token),
        head_dim=head_dim,
        vocab_size=size(keys, "vocab_size"),
        experts=experts if pattern is None or "E" in pattern else None,
        latent=latent,
        pattern=pattern,
        linear=_linear(keys) if pattern and re.search("[MH]", pattern) else None,
        indexer=_indexer(keys, layers) if latent is not None and keys.get("index_topk") else None,
        gated_attention=family.startswith(("qwen3_next", "qwen3_5")),
        ffn_matrices=2 if family in _UNGATED else 3,
    )
    if family in FAMILIES:
        return _with_windows(shape, keys) if "sliding_window" in FAMILIES[family] else shape
    types = document.get("layer_types")
    listed = isinstance(types, list) and {*map(str, types)} <= {_FULL, _SLIDING}
    if listed or (types is None and keys.get("use_sliding_window") is False):
        keys.setdefault("use_sliding_window", True)
        shape = _with_windows(shape, keys)
    for name, value in keys.items():
        if value and name not in keys.asked and _SHAPES_MORE.search(name):
            raise UserError(
                f"model_type {family!r} is not known, and its {name} is not priced; choose a preset or another model"
            )
    return shape


def _linear(keys: dict[str, Any]) -> LinearLayer:
    kind, *names = _LINEAR[keys["model_type"]]
    if keys.get("mamba_d_head") == "auto":
        inner = size(keys, "mamba_d_ssm", size(keys, "mamba_expand", 2) * size(keys, "hidden_size"))
        keys = keys | {"mamba_d_head": inner // size(keys, "mamba_n_heads")}
    return LinearLayer(kind, *(size(keys, name) for name in names))


def _pattern(keys: Keys, experts: Experts | None) -> str:
    """The blocks of a hybrid, as ``ModelShape`` has them."""
    family, types = keys["model_type"], keys.get("layers_block_type") or keys.get("layer_types")
    written = keys.get("hybrid_override_pattern")
    if types is None and family == "nemotron_h" and isinstance(written, str):
        return written.partition("/")[0].replace("|", "")
    layers = len(types) if family == "nemotron_h" and types else size(keys, "num_hidden_layers")
    full = keys.get("linear_full_attn_layers")
    if types is None and family == "kimi_linear" and isinstance(full, list):
        types = [_FULL if layer + 1 in full else "linear_attention" for layer in range(layers)]
    elif types is None and family == "falcon_h1":
        types = ["hybrid"] * layers
    elif types is None and "full_attention_interval" in keys:
        every = size(keys, "full_attention_interval")
        types = ["linear_attention" if (layer + 1) % every else _FULL for layer in range(layers)]
    if not isinstance(types, list):
        raise UserError("there is no layer_types; complete it")
    if unknown := [name for name in types if name not in list(_LETTERS)]:
        raise UserError(f"layer_types has {unknown[0]!r}, which is not supported; choose another model")
    mixers = [_LETTERS[name] for name in types]
    if family == "nemotron_h":
        return "".join(mixers)
    dense = layers if experts is None else experts.dense_layers
    return "".join(mixer + ("-" if layer < dense else "E") for layer, mixer in enumerate(mixers))


def _indexer(keys: Keys, layers: int) -> Indexer:
    """Blocks choose tokens anew as ``indexer_types`` or else every ``index_topk_freq``-th does (GLM-5.2), or all."""
    every, first = size(keys, "index_topk_freq", 1), size(keys, "index_skip_topk_offset", 2)
    types = keys.get("indexer_types") or [
        "shared" if max(layer - first + 1, 0) % every else "full" for layer in range(layers)
    ]
    if not isinstance(types, list) or len(types) != layers:
        raise UserError(f"indexer_types = {str(types)[:40]} does not list {layers} layers; correct it")
    top_k, heads, head_dim = (size(keys, name) for name in ("index_topk", "index_n_heads", "index_head_dim"))
    return Indexer(top_k, heads, head_dim, layers=types.count("full"))


def _experts(keys: Keys) -> Experts | None:
    """The experts, with names as families and ``transformers`` 5 write them; None without any."""
    family = keys["model_type"]
    count = next((name for name in _COUNTS if keys.get(name)), None)
    if family not in _MIXTURES and (count is None or family in FAMILIES.keys() - _LINEAR):
        return None
    for name in ("decoder_sparse_step", "moe_layer_freq"):
        if size(keys, name, 1) != 1:
            raise UserError(f"{name} = {keys[name]} is not priced; choose another model")
    dense = keys.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != [*range(len(dense))]:
        raise UserError(f"mlp_only_layers = {dense} is not priced; only the first layers may be dense")
    active = "num_experts_per_token" if family == "kimi_linear" else "num_experts_per_tok"
    width = size(keys, "intermediate_size" if family in _WIDE_EXPERTS else "moe_intermediate_size")
    shared = [size(keys, name, 0, least=0) for name in _SHARED]
    several = size(keys, "num_shared_experts" if family == "kimi_linear" else "n_shared_experts", 0, least=0)
    return Experts(
        size(keys, count or "num_local_experts"),
        size(keys, active),
        width,
        shared_hidden=max(shared) or width * several,
        dense_layers=size(keys, "first_k_dense_replace", len(dense), least=0),
        biased=family == "gpt_oss",
        latent=size(keys, "moe_latent_size", 0, least=0) or None,
    )


def _with_windows(shape: ModelShape, keys: Keys) -> ModelShape:
    """``shape`` with windows in blocks as ``layer_types`` says, or else as the keys of its family say."""
    family = keys["model_type"]
    switched = family.startswith("qwen") or family not in FAMILIES
    unused = keys.get("sliding_window") is None or (switched and not flag(keys, "use_sliding_window"))
    window = None if unused else size(keys, "sliding_window")
    types = None if family in _NO_LAYER_TYPES else keys.get("layer_types")
    if types is None:
        every = {"gemma3_text": size(keys, "sliding_window_pattern", 6), "gpt_oss": 2}.get(family)
        full = size(keys, "max_window_layers", least=0) if "max_window_layers" in FAMILIES.get(family, {}) else 0
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
