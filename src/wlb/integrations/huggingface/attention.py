"""Our attention as a ``transformers`` attention implementation, and the models for which it is exact."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from wlb.attention import segment_attention
from wlb.errors import UserError, require
from wlb.runtime.batch import ShardedAttention

NAME = "wlb"  # of the attention implementation
MaskMaker = partial[Tensor | None]

# Kinds of layers in ``config.layer_types`` that this attention computes (or refuses for long documents), and kinds
# without attention. Any other kind carries a state over the tokens or selects what it attends.
_LAYERS = {"full_attention", "attention", "sliding_attention", "chunked_attention", "moe", "mlp"}

# Models whose other layers learn from transformers where documents end (``seq_idx``, ``cu_seqlens``), as
# ``tests/integrations/huggingface/test_hybrids.py`` finds: since which version, and the modules of their kernels.
# Without kernels transformers mixes documents, and before 5.21 says nothing.
_CONVOLUTION, _DELTA, _MAMBA = "causal_conv1d", "fla.ops.gated_delta_rule", "mamba_ssm.ops.triton.ssd_combined"
_KERNELS = {
    **dict.fromkeys(("lfm2", "lfm2_moe"), ((5, 16), (_CONVOLUTION,))),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), ((5, 16), (_CONVOLUTION, _DELTA))
    ),
    **dict.fromkeys(("bamba", "granitemoehybrid", "zamba2"), ((5, 16), (_CONVOLUTION, _MAMBA))),
    **dict.fromkeys(("falcon_h1", "nemotron_h"), ((5, 17), (_CONVOLUTION, _MAMBA))),
}

_UNPACKED = {"eager", "sdpa", "flex_attention", "None"}  # attention that leaves documents to masks

# Arguments of an attention function, with numbers or tensors, that ours may ignore.
_HARMLESS = {
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "cache_position", "seq_idx"),
    *("shift_labels", "num_items_in_batch", "logits_to_keep", "sliding_window"),
}


def register_attention(model: nn.Module | None = None, *, name: str = NAME) -> None:
    """Register our attention in ``transformers`` as the implementation ``name``, and use it in ``model`` if given.

    The model then takes packed micro-batches of one row (``FlatteningCollator``, ``PackedBatch``), in memory that does
    not grow with the square of the tokens. Encoders of images or audio keep their attention. Without gradients the
    model also takes batches that are not packed, and uses ``sdpa`` for them.

    Raises ``UserError`` for a model that does not support it. The attention raises it for masks, caches, rows without
    ``cu_seq_lens_q``, dropout, documents over chunks or rotary scaling, and unknown arguments (softcap, sinks, a bias).
    """
    transformers = require("transformers", "hf")
    transformers.AttentionInterface.register(name, packed_attention)
    transformers.AttentionMaskInterface.register(name, _mask)
    if model is None:
        return
    if not hasattr(model, "set_attn_implementation"):
        kind = type(model).__name__
        raise UserError(f"{kind} is not a transformers model; call wlb.attention.segment_attention in your model")
    if getattr(model.config, "use_cache", False):
        raise UserError("model.config.use_cache = True makes packed documents attend each other; set it to False")
    refuse(objections_to_model(model))
    attend_with(model, name)


def prepare_model(model: Any) -> list[str]:
    """Let ``model`` train packed documents; returns what was set. Raises ``UserError`` if it cannot."""
    changed, config = [], getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]
        changed.append("model.config.use_cache = False")
    refuse(objections_to_model(model))
    attention = str(getattr(config, "_attn_implementation", None))
    if hasattr(model, "set_attn_implementation") and "flash" not in attention and not is_packed_attention(model):
        register_attention(model)
        changed.append(f'the attention "{NAME}" instead of {attention}')
    return changed


_ARMED: list[Any] = []  # the hook of ``check_next_model``


def check_next_model(shared: bool) -> None:
    """Raise ``UserError`` at the next call by keywords alone, if it is of a transformers model that may mix documents.

    FlashAttention keeps them apart, unless ranks have ``shared`` their micro-batch.
    """

    def check(called: nn.Module, positional: Any) -> None:
        if positional:  # another model, called before the one that gets the batch as keywords
            return
        _ARMED.pop().remove()
        while not hasattr(called, "set_attn_implementation"):  # inside DDP, FSDP, torch.compile
            if len(inner := [*called.children()]) != 1:
                return
            (called,) = inner
        attention = str(getattr(called.config, "_attn_implementation", None))
        if attention in _UNPACKED or ("flash" in attention and shared):
            mixes = f"{type(called).__name__} attends with {attention}, which may mix the documents of a PackedBatch"
            remedy = "call register_attention(model) of wlb.integrations.huggingface, or pass the fields of the batch"
            raise UserError(f"{mixes}; {remedy}")
        refuse(objections_to_model(called))

    for unused in _ARMED:
        unused.remove()
    _ARMED[:] = [register_module_forward_pre_hook(check)]


def attend_with(model: Any, name: str) -> None:
    """Let the language model in ``model`` attend with the implementation ``name``; its encoders keep theirs."""
    config, text = model.config, _text(model.config)
    parts = {part: getattr(config, part, None) for part in getattr(config, "sub_configs", ())}
    encoders = {part: own._attn_implementation for part, own in parts.items() if own is not None and own is not text}
    model.set_attn_implementation(name)
    if encoders:
        model.set_attn_implementation(encoders)


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def refuse(objections: Iterator[str]) -> None:
    """Raise ``UserError`` with the first of ``objections``, if there are any."""
    for objection in objections:
        raise UserError(objection)


def objections_to_model(model: Any) -> Iterator[str]:
    """Reasons why settings or layers of ``model`` may mix packed documents."""
    if (config := getattr(model, "config", None)) is None:
        return
    adapters = (getattr(model, "peft_config", None) or {}).values()
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters):
        yield "prompt and prefix tuning put tokens before a row, where only one document sees them; train LoRA instead"
    if any(getattr(part, "output_router_logits", False) for part in (config, _text(config))):
        mean = "output_router_logits = True adds a router loss, a mean over tokens that packing changes"
        yield f"{mean} and batch.loss leaves out; set it to False (your own loop may add RouterLosses)"
    kinds, name = _other_layers(config), type(model).__name__
    if kinds or getattr(model, "_is_stateful", False):
        layers = f"{name} has layers of {', '.join(sorted(kinds)) or 'recurrence'}"
        since, kernels = _KERNELS.get(_text(config).model_type, (None, ()))
        if since is None:
            yield f"{layers}, and transformers does not tell them where documents end; train it unpacked"
            return
        if tuple(map(int, require("transformers", "hf").__version__.split(".")[:2])) < since:
            yield f"{layers}, which learn where documents end since transformers {since[0]}.{since[1]}; upgrade it"
        # transformers has imported those that work, and goes on without the others.
        if missing := [kernel.partition(".")[0] for kernel in kernels if kernel not in sys.modules]:
            apart = f"only GPU kernels keep documents apart in them, and {' and '.join(missing)} cannot be imported"
            yield f"{layers}, where {apart}; install {'both' if missing[1:] else 'it'}, or train it unpacked"
    elif not (getattr(model, "_supports_attention_backend", False) and model._can_set_attn_implementation()):
        through = "transformers' AttentionInterface (_supports_attention_backend)"
        yield f"{name} does not use {through}, so packed documents may attend each other; train it unpacked"


def _other_layers(config: Any) -> set[str]:
    """The kinds of layers that carry a state or select what they attend."""
    text = _text(config)
    kinds = {kind for name in ("layer_types", "layers_block_type") for kind in getattr(text, name, None) or ()}
    if hasattr(text, "index_topk"):  # DeepSeek's indexer takes the best keys of the row, not of the document
        kinds.add("sparse attention")
    return kinds - _LAYERS


def check_rotary(config: Any, lengths: Sequence[int]) -> None:
    """Raise ``UserError`` if a document of ``lengths`` changes the rotary frequencies of others in its micro-batch.

    Past the pretraining length transformers scales by the highest position of a row.
    """
    text = _text(config)
    rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for of_layers in (rotary, *(value for value in rotary.values() if isinstance(value, Mapping))):
        kind, limit = str(of_layers.get("rope_type", of_layers.get("type"))), None
        if "dynamic" in kind:
            limit = text.max_position_embeddings
        elif kind == "longrope":
            usual = getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings
            limit = of_layers.get("original_max_position_embeddings") or usual
        if limit and max(lengths) > limit:
            changes = f"over {limit} tokens rotary scaling {kind} changes all documents of a micro-batch"
            raise UserError(f"a document has {max(lengths)} tokens, and {changes}; give shorter documents")


def is_packed_attention(model: nn.Module) -> bool:
    """Whether ``model`` uses the attention of ``register_attention``, under any name."""
    interface = require("transformers", "hf").AttentionInterface()
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return name in interface and interface[name] is packed_attention


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskMaker | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """An attention function as ``transformers`` calls it: tensors of shape (1, heads, tokens, head_dim)."""
    attend: ShardedAttention | None = arguments.get("attend")
    refuse(_unknown(arguments))
    if attend is None and "cu_seq_lens_q" not in arguments and not torch.is_grad_enabled():
        mask = attention_mask() if isinstance(attention_mask, partial) else attention_mask
        by_sdpa = require("transformers", "hf").AttentionInterface()["sdpa"]
        arguments |= {"scaling": scaling, "dropout": dropout}
        return cast(tuple[Tensor, None], by_sdpa(module, query, key, value, mask, **arguments))
    refuse(_objections(module, query, key, attention_mask, dropout, arguments))
    lengths = _lengths(arguments["cu_seq_lens_q"]) if attend is None else attend.shard_plan.segment_lengths
    check_rotary(getattr(module, "config", None), lengths)
    window = _window(attention_mask, arguments.get("sliding_window"), lengths)
    usual = query.shape[-1] ** -0.5
    if scaling is not None and not math.isclose(scaling, usual, rel_tol=1e-6):
        query = query * (scaling / usual)
    kind = query.device.type  # under autocast rotated queries and keys are float32 again, but values are not
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    q, k, v = (tensor[0].transpose(0, 1).to(dtype).contiguous() for tensor in (query, key, value))
    compute: Any = attend or partial(segment_attention, segment_lengths=lengths)
    return compute(q, k, v, window=window)[None], None


def _lengths(cu_seqlens: Tensor) -> list[int]:
    """From a GPU once a micro-batch: all layers pass the same tensor, which may be written again for the next one."""
    if cu_seqlens.device.type == "cpu" or cu_seqlens.is_inference():  # nothing counts all writes of these
        return _read_lengths.__wrapped__(cu_seqlens, 0)
    return _read_lengths(cu_seqlens, cu_seqlens._version)


@lru_cache(maxsize=1)
def _read_lengths(cu_seqlens: Tensor, version: int) -> list[int]:
    return [*map(int, cu_seqlens.diff().tolist())]


def _mask(*positional: Any, **arguments: Any) -> MaskMaker | None:
    """A function that makes the mask of ``sdpa``. Raises ``UserError`` if training would need that mask."""
    make: MaskMaker = partial(require("transformers", "hf").AttentionMaskInterface()["sdpa"], *positional, **arguments)
    if torch.is_grad_enabled():
        refuse(_objections_to_mask(make))
        if arguments.get("local_size") is None:
            return None
    return make


def _objections_to_mask(mask: Tensor | MaskMaker | None) -> Iterator[str]:
    settings = mask.keywords if isinstance(mask, partial) else {"attention_mask": mask}
    if (given := settings.get("attention_mask")) is not None:
        shape = tuple(given.shape)
        made = f"attention_mask of shape {shape} was given, or made by the model as in OPT before transformers 5.18"
        yield f"{made}, but packed micro-batches have none; use FlatteningCollator, or train this model unpacked"
    if "allow_is_bidirectional_skip" in settings or settings.get("use_vmap"):  # transformers sets these for both
        yield "attention that is not causal, or that has its own mask, is not supported; train the model unpacked"


def _window(mask: Tensor | MaskMaker | None, window: int | None, lengths: Sequence[int]) -> int | None:
    """The sliding window of the layer, or None if every document fits into it."""
    local = mask.keywords.get("local_size") if isinstance(mask, partial) else None
    sizes = [size for size in (local, window) if size is not None]
    if max(lengths) <= min(sizes, default=max(lengths)):
        return None
    if local != window:  # chunked attention has a mask but no window
        over = f"a document has {max(lengths)} tokens, over the {min(sizes)} of attention_chunk_size or sliding_window"
        raise UserError(f"{over}, and the layers do not attend in a plain sliding window; give shorter documents")
    return window


def _objections(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, dropout: float, given: Mapping[str, Any]
) -> Iterator[str]:
    """Reasons why this attention would be wrong."""
    (rows, _, queries, _), keys, shared = query.shape, key.shape[2], given.get("attend") is not None
    yield from _objections_to_mask(mask)
    if rows != 1:
        yield f"a batch of {rows} rows is not packed; put all documents into one row, as FlatteningCollator does"
    if queries != keys:
        yield f"{queries} queries attend {keys} keys, so there is a cache; set use_cache = False, generate with sdpa"
    if "cu_seq_lens_q" not in given and not shared:
        yield "the attention gets no cu_seq_lens_q from the batch through the model; use FlatteningCollator"
    if dropout:
        yield f"attention_dropout = {dropout} is not supported; set model.config.attention_dropout = 0.0"
    if given.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        yield "attention that is not causal is not supported; use another attention implementation"
    if shared and (kinds := _other_layers(getattr(module, "config", None))):
        yield f"layers of {', '.join(sorted(kinds))} cannot be shared by ranks; leave cp out"


def _unknown(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Arguments of the model's attention that neither ours nor sdpa reads."""
    for name, value in arguments.items():
        if name not in _HARMLESS and isinstance(value, Tensor | int | float) and not isinstance(value, bool):
            shown = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"= {value}"
            yield f"{name} {shown} is not supported; use flash_attention_2 for this model"
