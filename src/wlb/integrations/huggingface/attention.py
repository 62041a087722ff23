"""Our attention as a ``transformers`` attention implementation, and the models for which it is exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wlb.attention import segment_attention
from wlb.errors import UserError, require
from wlb.runtime.sharded_batch import ShardedAttention

NAME = "wlb"  # of the attention implementation

# Layers that this attention computes, or refuses by the length of the documents, by the names in ``config.layer_types``
# ("attention" is an older one). Layers of any other kind carry a state over the tokens or choose what they attend.
_LAYERS = {"full_attention", "attention", "sliding_attention", "chunked_attention"}

# Arguments of an attention function with numbers or tensors that this one may pass over.
_HARMLESS = {
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "cache_position", "seq_idx"),
    *("shift_labels", "num_items_in_batch", "logits_to_keep", "sliding_window"),
}


def register_attention(
    model: nn.Module | None = None, *, name: str = NAME, group: dist.ProcessGroup | None = None
) -> None:
    """Make our attention known to ``transformers`` as the implementation ``name``, and use it in ``model`` if given.

    A model that uses it takes packed micro-batches of one row with ``cu_seq_lens_q`` (``FlatteningCollator``), and with
    ``attend`` one rank's share of them (``PackedBatch``, ``context_parallel_share``). The ranks of ``group``
    attend those together, unless the batch names another group; None is the default group. It is exact, as fast as what
    it runs on (``wlb.attention``), and its memory does not grow with the square of the tokens. Sliding windows are
    attended as such. Encoders of images or audio keep their own.
    Without gradients the model also takes batches that are not packed, as in generation, and attends them by ``sdpa``.

    Raises ``UserError`` for a model whose ``config.use_cache`` is on, that does not attend through ``transformers``'
    AttentionInterface, or that has layers other than attention. The attention raises it for what would silently train
    something else: an attention mask, a cache, a batch without ``cu_seq_lens_q`` or of several rows, dropout, a
    document longer than the chunks of chunked attention or than rotary scaling by length allows (``check_rotary``),
    attention that is not causal, and any number or tensor that the model gives to its attention and that is not known
    here (softcap, sinks, a position bias).
    """
    transformers = require("transformers", "hf")
    transformers.AttentionInterface.register(name, PackedAttention(group))
    transformers.AttentionMaskInterface.register(name, _mask)
    if model is None:
        return
    if not hasattr(model, "set_attn_implementation"):
        raise UserError(
            f"{type(model).__name__} is no model of transformers, whose attention could be chosen; let it attend by "
            "wlb.attention.segment_attention"
        )
    check_model(model)
    attend_with(model, name)


def attend_with(model: Any, name: str) -> None:
    """Let the language model in ``model`` attend with the implementation ``name``; its encoders keep theirs."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    parts = {part: getattr(config, part, None) for part in getattr(config, "sub_configs", ())}
    encoders = {part: own._attn_implementation for part, own in parts.items() if own is not None and own is not text}
    model.set_attn_implementation(name)
    if encoders:
        model.set_attn_implementation(encoders)


def check_model(model: nn.Module) -> None:
    """Raise ``UserError`` unless the settings and layers of a model are known to keep packed documents apart."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return
    adapters = (getattr(model, "peft_config", None) or {}).values()
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters):
        raise UserError(
            "prompt and prefix tuning put their tokens before a row, and all documents of a micro-batch but the first "
            "would miss them; train LoRA, or this adapter without packing"
        )
    if getattr(config, "use_cache", False):
        raise UserError(
            "model.config.use_cache = True makes transformers leave out the mask between packed documents, so they "
            "would attend each other; set model.config.use_cache = False"
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = {kind for name in ("layer_types", "layers_block_type") for kind in getattr(text, name, None) or ()}
    if getattr(model, "_is_stateful", False) or kinds - _LAYERS:
        named = ", ".join(sorted(kinds - _LAYERS)) or "recurrence"
        raise UserError(
            f"{type(model).__name__} has layers of {named}, and packed documents are known to be kept apart in those "
            "of full and sliding attention only; train a model that has no others, or this one without packing"
        )
    network: Any = model
    if not (getattr(network, "_supports_attention_backend", False) and network._can_set_attn_implementation()):
        raise UserError(
            f"{type(model).__name__} does not say that it attends through transformers' AttentionInterface "
            "(_supports_attention_backend), without which packed documents may attend each other; train a model that "
            "does, such as Llama"
        )


def check_rotary(config: Any, lengths: Sequence[int]) -> None:
    """Raise ``UserError`` where a document of ``lengths`` changes the rotary frequencies of others in its micro-batch.

    transformers scales by the highest position of a row: longrope takes other factors past the length of pretraining,
    and dynamic scaling grows with it. A row without such documents is exact.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for of_layers in (rotary, *(value for value in rotary.values() if isinstance(value, Mapping))):
        kind = str(of_layers.get("rope_type", of_layers.get("type")))
        if kind == "longrope":
            usual = getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings
            limit = of_layers.get("original_max_position_embeddings") or usual
        elif "dynamic" in kind:
            limit = text.max_position_embeddings
        else:
            continue
        if max(lengths) > limit:
            raise UserError(
                f"a document has {max(lengths)} tokens, and past {limit} the model's rotary scaling, {kind}, changes "
                "that of all documents in its micro-batch; give shorter documents, or a model whose scaling does not "
                "depend on their length (llama3, yarn, linear)"
            )


def is_packed_attention(model: nn.Module) -> bool:
    """Whether ``model`` attends with what ``register_attention`` registered, under whichever name."""
    interface = require("transformers", "hf").AttentionInterface()
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return name in interface and isinstance(interface[name], PackedAttention)


class _Mask:
    """In place of the mask of a kind of layers, which packed micro-batches do not need.

    In layers of sliding or chunked attention tokens attend the ``size`` tokens up to their own, or in their chunk; in
    others it is None. ``refusal`` is why a packed micro-batch with such a mask is not supported.
    """

    def __init__(self, size: int | None, refusal: str | None, make: Callable[[], Tensor | None]) -> None:
        self.size, self.refusal, self._make = size, refusal, make

    @cached_property
    def of_sdpa(self) -> Tensor | None:
        return self._make()


class PackedAttention:
    """An attention function as ``transformers`` calls it: tensors of shape (1, heads, tokens, head_dim)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._extents: Tensor | None = None  # of the last micro-batch, so that its layers read them once
        self._lengths: list[int] = []

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | _Mask | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        attend: ShardedAttention | None = arguments.get("attend")
        if attend is None and "cu_seq_lens_q" not in arguments and not torch.is_grad_enabled():
            _refuse_unknown(arguments)
            mask = attention_mask.of_sdpa if isinstance(attention_mask, _Mask) else attention_mask
            by_sdpa = require("transformers", "hf").AttentionInterface()["sdpa"]
            attended: tuple[Tensor, None] = by_sdpa(
                module, query, key, value, mask, scaling=scaling, dropout=dropout, **arguments
            )
            return attended
        _refuse(module, query, key, attention_mask, dropout, arguments)
        lengths = self._segment_lengths(arguments) if attend is None else attend.shard_plan.segment_lengths
        check_rotary(getattr(module, "config", None), lengths)
        window = _window(attention_mask, arguments.get("sliding_window"), lengths)
        wanted = query.shape[-1] ** -0.5 if scaling is None else scaling
        if not math.isclose(wanted, query.shape[-1] ** -0.5, rel_tol=1e-6):
            query = query * (wanted * query.shape[-1] ** 0.5)
        kind = query.device.type  # under autocast rotated queries and keys are float32 again, and values are not
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        q, k, v = (tensor[0].transpose(0, 1).to(dtype).contiguous() for tensor in (query, key, value))
        if attend is None:
            return segment_attention(q, k, v, lengths, window=window)[None], None
        if attend.group is None:
            attend = replace(attend, group=self._group)
        return attend(q, k, v, window=window)[None], None

    def _segment_lengths(self, arguments: Mapping[str, Any]) -> list[int]:
        extents: Tensor = arguments["cu_seq_lens_q"]
        if extents is not self._extents:
            self._extents, self._lengths = extents, extents.diff().tolist()
        return self._lengths


def _mask(
    *positional: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **arguments: Any
) -> _Mask | None:
    """In place of the mask that ``transformers`` would make; raises ``UserError`` where training would need one."""
    refusal = None
    if attention_mask is not None:
        refusal = _refused_mask(attention_mask)
    elif "allow_is_bidirectional_skip" in arguments or arguments.get("use_vmap"):  # what transformers gives for these
        refusal = "attention that is not causal, or has a mask of the model's own, is not supported"
    if torch.is_grad_enabled():
        if refusal:
            raise UserError(refusal)
        if local_size is None:
            return None
    make = require("transformers", "hf").AttentionMaskInterface()["sdpa"]
    return _Mask(
        local_size,
        refusal,
        partial(make, *positional, attention_mask=attention_mask, local_size=local_size, **arguments),
    )


def _refused_mask(mask: Tensor) -> str:
    return (
        f"an attention_mask of shape {tuple(mask.shape)} was given; packed micro-batches have none: use "
        "FlatteningCollator, which leaves it out"
    )


def _window(mask: Tensor | _Mask | None, window: int | None, lengths: Sequence[int]) -> int | None:
    """The sliding window to attend with, None where every document fits into it."""
    local = mask.size if isinstance(mask, _Mask) else None
    sizes = [size for size in (local, window) if size is not None]
    if max(lengths) <= min(sizes, default=max(lengths)):
        return None
    if local != window:  # a mask without a window is that of chunked attention
        raise UserError(
            f"a document has {max(lengths)} tokens, over the {min(sizes)} of the model's attention_chunk_size or "
            "sliding_window, and its layers do not attend in a plain sliding window; give shorter documents"
        )
    return window


def _refuse(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | _Mask | None,
    dropout: float,
    arguments: Mapping[str, Any],
) -> None:
    """Raise ``UserError`` for what this attention would not compute."""
    if isinstance(mask, Tensor):
        raise UserError(_refused_mask(mask))
    if mask is not None and mask.refusal:
        raise UserError(mask.refusal)
    if query.shape[0] != 1:
        raise UserError(
            f"a batch of {query.shape[0]} rows, query (b, heads, s, head_dim) = {tuple(query.shape)}, is not packed; "
            "lay its documents one after another in one row, as FlatteningCollator does"
        )
    if query.shape[2] != key.shape[2]:
        raise UserError(
            f"{query.shape[2]} queries attend {key.shape[2]} keys: there is a cache; set use_cache = False, and "
            'generate with another attention implementation, such as "sdpa"'
        )
    if "cu_seq_lens_q" not in arguments and arguments.get("attend") is None:
        raise UserError(
            "the batch has no cu_seq_lens_q, so documents are not known; use FlatteningCollator, and a model that "
            "hands its keyword arguments on to its attention"
        )
    if dropout:
        raise UserError(f"attention_dropout = {dropout} is not supported; set model.config.attention_dropout = 0.0")
    _refuse_unknown(arguments)
    if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UserError("attention that is not causal is not supported; use another attention implementation")


def _refuse_unknown(arguments: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for what the model gives to its attention and neither this one nor sdpa would look at."""
    for name, value in arguments.items():
        if name not in _HARMLESS and isinstance(value, Tensor | int | float) and not isinstance(value, bool):
            shown = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"= {value}"
            raise UserError(f"{name} {shown} is not supported; use flash_attention_2 for this model")
