"""The work to measure: attention on the back end itself, the trainer's block, and the layers around the blocks.

Many short documents are measured at a time, as in a packed micro-batch, because one alone would not fill a GPU. All
inputs are cut from the same few buffers, so that a long document needs its memory only once.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wlb.attention import segment_attention
from wlb.attention.backends import pick_backend, reference
from wlb.attention.variable_length import VariableLengthBatch
from wlb.errors import UserError
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Attend, Block, Head, TransformerConfig, rotary_angles
from wlb.profiling.timing import Case
from wlb.runtime.loss import packed_loss
from wlb.workload.shapes import ModelShape

_FILL_TOKENS = {"cpu": 4096, "cuda": 16_384}  # tokens of documents measured together
_MOST_SCORES = 2**28  # of the output head at once; more tokens are extrapolated in proportion

Key = tuple[str, tuple[int, ...]]  # the arguments of ``Workbench.case``


class Workbench:
    """One block of ``shape``, the part of one tensor-parallel rank, with inputs of up to ``max_tokens`` tokens.

    Raises ``UserError`` if this device has no flash attention for this type.
    """

    def __init__(self, shape: ModelShape, max_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self._max_tokens = shape, max_tokens
        self._fill_tokens = min(_FILL_TOKENS[device.type], max_tokens)
        random = torch.Generator(device).manual_seed(0)

        def buffer(*size: int) -> Tensor:
            return torch.randn(max_tokens, *size, generator=random, device=device, dtype=dtype)

        self._query, self._grad_out = (buffer(shape.heads, shape.head_dim) for _ in range(2))
        self._key, self._value = (buffer(shape.kv_heads, shape.head_dim) for _ in range(2))
        self._stream, self._grad_stream = (buffer(shape.hidden) for _ in range(2))
        self._ids = torch.randint(shape.vocab_size, (max_tokens,), generator=random, device=device)
        self._backend = pick_backend(self._query)
        if self._backend is reference:
            raise UserError(f"flash attention on {device.type} does not support dtype {dtype}; choose another --dtype")
        config = TransformerConfig(shape)
        self._rotation = partial(rotary_angles, config=config, dtype=dtype)
        self._positions = torch.arange(max_tokens, device=device)
        self._block, self._head = Block(config), Head(config)
        self._embedding = nn.Embedding(shape.vocab_size, shape.hidden)
        for module in (self._block, self._embedding, self._head):
            initialise_weights(module.to(device, dtype), layers=shape.layers, seed=0)

    def case(self, kind: str, tokens: tuple[int, ...]) -> tuple[Case, float]:
        """The work of ``kind`` on ``tokens``, and how many times (or which fraction of) it the case runs.

        "documents": attention over documents of one length. "prefix": attention of queries over keys before them.
        "linear": a block without attention. "block": a block with segments of these lengths. "ends": rotary angles,
        embedding, head and loss.
        """
        if kind == "documents":
            count = max(1, self._fill_tokens // tokens[0])
            return self.attention(VariableLengthBatch.of_segments(tokens * count)), count
        if kind == "prefix":
            queries, keys = tokens
            count = max(1, min(self._fill_tokens // queries, self._max_tokens // keys))
            return self.attention(VariableLengthBatch((queries,) * count, (keys,) * count, causal=False)), count
        if kind == "ends":
            scored = max(1, min(*tokens, self._max_tokens, _MOST_SCORES // self.shape.vocab_size))
            return Case(partial(self._ends, scored), Tensor.backward), scored / sum(tokens)
        attend = _Skip.apply if kind == "linear" else partial(segment_attention, segment_lengths=tokens)
        return self._through(sum(tokens), attend), 1.0

    def attention(self, batch: VariableLengthBatch) -> Case:
        """Attention of any sequences of at most ``max_tokens`` queries and keys."""
        queries, keys = sum(batch.query_lengths), sum(batch.key_lengths)
        grad_out, inputs = self._grad_out[:queries], (self._query[:queries], self._key[:keys], self._value[:keys])
        forward, backward = self._backend.forward, self._backend.backward
        return Case(lambda: forward(*inputs, batch), lambda made: backward(grad_out, *inputs, made[0], made[1], batch))

    def _through(self, tokens: int, attend: Attend) -> Case:
        rotation = self._rotation(self._positions[:tokens])

        def forward() -> Tensor:
            out: Tensor = self._block(self._stream[:tokens].detach().requires_grad_(), rotation, attend)
            return out

        # Parameters accumulate gradients from call to call, as over the micro-batches of a step.
        return Case(forward, lambda out: out.backward(self._grad_stream[:tokens]))

    def _ends(self, tokens: int) -> Tensor:
        ids, _ = self._ids[:tokens], self._rotation(self._positions[:tokens])
        return packed_loss(self._head(self._embedding(ids)), ids, tokens, averaged_over=1, overwrite=True)


class _Skip(torch.autograd.Function):
    """Replaces attention: returns the query, and gradients of key and value of the right shape, at no cost."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.kv_heads = key.shape[1]
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad_key = grad_out[:, : ctx.kv_heads]
        return grad_out, grad_key, grad_key
