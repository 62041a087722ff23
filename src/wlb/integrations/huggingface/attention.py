"""Our attention as a ``transformers`` attention implementation, and a check of a model's gradients under it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from wlb.attention import context_parallel_attention, segment_attention
from wlb.errors import UserError, require
from wlb.integrations.checks import PackingCheck, check_packing

NAME = "wlb"  # of the attention implementation


def register_attention(
    model: nn.Module | None = None, *, name: str = NAME, group: dist.ProcessGroup | None = None
) -> None:
    """Make our attention known to ``transformers`` as the implementation ``name``, and use it in ``model`` if given.

    A model that uses it takes packed micro-batches of one row with ``cu_seq_lens_q`` (``FlatteningCollator``), and with
    ``shard_plan`` one rank's share of them (``context_parallel_share``), which the ranks of ``group`` attend together;
    None is the default group. It is exact, as fast as what it runs on (``wlb.attention``), and its memory does not grow
    with the square of the tokens.

    Raises ``UserError`` for a model whose ``config.use_cache`` is on. The attention raises it for what would silently
    train something else: an attention mask, a cache, a batch without ``cu_seq_lens_q`` or of several rows, dropout,
    sliding windows, attention that is not causal.
    """
    transformers = require("transformers", "hf")
    transformers.AttentionInterface.register(name, _PackedAttention(group))
    transformers.AttentionMaskInterface.register(name, _no_mask)
    if model is not None:
        check_model(model)
        model.set_attn_implementation(name)  # type: ignore[operator]  # of every pretrained model


def check_model(model: nn.Module) -> None:
    """Raise ``UserError`` for a model with settings under which packed documents attend each other."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        raise UserError(
            "model.config.use_cache = True makes transformers leave out the mask between packed documents, so they "
            "would attend each other; set model.config.use_cache = False"
        )


class _PackedAttention:
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
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        _refuse(module, query, key, attention_mask, dropout, arguments)
        if scaling is not None and not math.isclose(scaling, query.shape[-1] ** -0.5, rel_tol=1e-6):
            query = query * (scaling * query.shape[-1] ** 0.5)
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        plan = arguments.get("shard_plan")
        if plan is None:
            return segment_attention(q, k, v, self._segment_lengths(arguments))[None], None
        rank = dist.get_rank(self._group)
        local = int(plan.tokens_per_rank[rank])
        out = context_parallel_attention(q[:local], k[:local], v[:local], plan, self._group)
        return F.pad(out, (0, 0, 0, 0, 0, len(q) - local))[None], None

    def _segment_lengths(self, arguments: Mapping[str, Any]) -> list[int]:
        extents: Tensor = arguments["cu_seq_lens_q"]
        if extents is not self._extents:
            self._extents, self._lengths = extents, extents.diff().tolist()
        return self._lengths


def _no_mask(*positional: Any, attention_mask: Tensor | None = None, **arguments: Any) -> None:
    """In place of the mask that ``transformers`` would make: none is needed, and none may be given."""
    if attention_mask is not None:
        raise UserError(
            f"an attention_mask of shape {tuple(attention_mask.shape)} was given; packed micro-batches have none: use "
            "FlatteningCollator, which leaves it out"
        )


def _refuse(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, arguments: Mapping[str, Any]
) -> None:
    """Raise ``UserError`` for what this attention would not compute."""
    if mask is not None:
        _no_mask(attention_mask=mask)
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
    if "cu_seq_lens_q" not in arguments and arguments.get("shard_plan") is None:
        raise UserError("the batch has no cu_seq_lens_q, so documents are not known; use FlatteningCollator")
    if dropout:
        raise UserError(f"attention_dropout = {dropout} is not supported; set model.config.attention_dropout = 0.0")
    for name in ("sliding_window", "softcap", "s_aux"):
        if arguments.get(name) is not None:
            raise UserError(f"{name} = {arguments[name]} is not supported; use flash_attention_2 for this model")
    if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UserError("attention that is not causal is not supported; use another attention implementation")


def check_batch(model: nn.Module, batch: Mapping[str, Any]) -> PackingCheck:
    """``check_packing`` of one collated micro-batch of a model that is not wrapped yet (by DDP, FSDP, ...).

    Raises ``UserError`` where packing it changes loss or gradients.
    """

    def loss_of(inputs: Mapping[str, Any]) -> Tensor:
        loss: Tensor = model(**inputs, num_items_in_batch=1).loss  # the sum over labelled tokens
        return loss

    return check_packing(model, partial(loss_of, batch), (partial(loss_of, one) for one in _singles(batch)))


def _singles(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The documents of ``batch``, each as a micro-batch of its own."""
    extents = batch["cu_seq_lens_q"].tolist()
    for start, stop in pairwise(extents):
        one = torch.tensor([0, stop - start], dtype=torch.int32)
        yield {
            **{name: batch[name][:, start:stop] for name in ("input_ids", "position_ids", "labels")},
            "cu_seq_lens_q": one,
            "cu_seq_lens_k": one,
            "max_length_q": stop - start,
            "max_length_k": stop - start,
            "use_cache": False,
        }
