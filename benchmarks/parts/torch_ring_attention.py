"""torch's ring attention for context parallelism, on the CPU kernel that it lacks.

torch 2.13's ``context_parallel`` replaces the CUDA attention operators by a ring of partial attentions; on CPU tensors
it stops ("does not have a sharding strategy registered"). The ring itself takes any operator that returns output and
log-sum-exp, so here it gets the same CPU operator that ``wlb.attention`` runs on. Its causal mask is one sequence
that all ranks cut into head and tail chunks, so a packed micro-batch is one call per document, and every document
must be a multiple of 2 x CP tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
    set_rotate_method,
)

ROTATE_METHODS = {"torch, all-gather": "allgather", "torch, ring": "alltoall"}
_NO_DROPOUT, _SEQUENCE_DIM = 0.0, 2
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def torch_attention(query: Tensor, key: Tensor, value: Tensor, local_lengths: list[int], method: str) -> Tensor:
    """Causal attention over this rank's head and tail chunk of each document, (tokens, heads, head_dim), in its order.

    ``local_lengths`` are this rank's tokens of each document; the rank's tokens are document after document.
    """
    set_rotate_method(ROTATE_METHODS[method])
    documents = (tensor.transpose(0, 1)[None].split(local_lengths, dim=_SEQUENCE_DIM) for tensor in (query, key, value))
    outs = [_Ring.apply(*document) for document in zip(*documents, strict=True)]
    return torch.cat(outs, dim=_SEQUENCE_DIM)[0].transpose(0, 1)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, log_sum_exp = _templated_ring_attention(
            _world(), _SEQUENCE_DIM, _attend, query, key, value, is_causal=True
        )
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, log_sum_exp = ctx.saved_tensors
        grads = _templated_ring_attention_backward(
            _world(),
            _SEQUENCE_DIM,
            _attend_backward,
            grad_out,
            "grad_out",
            query,
            key,
            value,
            out,
            log_sum_exp,
            is_causal=True,
        )
        return grads[0], grads[1], grads[2]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = _forward(query, key, value, _NO_DROPOUT, options["is_causal"])
    return results


def _attend_backward(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    grad_out, out, log_sum_exp = options["grad_out"], options["out"], options["logsumexp"]
    grads: tuple[Tensor, ...] = _backward(
        grad_out, query, key, value, out, log_sum_exp, _NO_DROPOUT, options["is_causal"]
    )
    return grads
