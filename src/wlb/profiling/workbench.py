"""The work that is measured: attention, a block without it, a block with it, and what surrounds the blocks.

Attention is called on the back end itself. The linear part is the trainer's own block with attention left out:
projections, rotary embedding, norms, feed-forward and residual additions. ``ends`` is what a micro-batch passes once
and not in every block: rotary angles, embedding, output head and loss.

Short documents are measured many at a time, as they come in a packed micro-batch; alone they would not fill a GPU.
All inputs are cut from the same few buffers, so that a long document needs its memory once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wlb.attention import segment_attention
from wlb.attention.backends import pick_backend, reference
from wlb.attention.runs import Runs
from wlb.errors import UserError
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Attend, Attention, Block, Head, Rotation, TransformerConfig, rotary_angles
from wlb.profiling.timing import Case
from wlb.training.parallel.pipeline import LossTarget, token_loss
from wlb.workload.shapes import ModelShape

_FILL_TOKENS = {"cpu": 4096, "cuda": 16_384}  # of documents measured together
_MOST_SCORES = 2**28  # that the output head makes at once; more tokens are extrapolated, in proportion


class Workbench:
    """One transformer block of ``shape``, with inputs of up to ``max_tokens`` tokens.

    ``shape`` is what one tensor-parallel rank holds; all of its layers are alike, so one is measured. Raises
    ``UserError`` if this device has no flash attention for this type.
    """

    def __init__(self, shape: ModelShape, max_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self._max_tokens = max_tokens
        self._fill_tokens = min(_FILL_TOKENS[device.type], max_tokens)
        self._most_scored = max(1, min(max_tokens, _MOST_SCORES // shape.vocab_size))
        random = torch.Generator(device).manual_seed(0)

        def buffer(*size: int) -> Tensor:
            return torch.randn(max_tokens, *size, generator=random, device=device, dtype=dtype)

        self._query, self._grad_out = (buffer(shape.heads, shape.head_dim) for _ in range(2))
        self._key, self._value = (buffer(shape.kv_heads, shape.head_dim) for _ in range(2))
        self._stream, self._grad_stream = (buffer(shape.hidden) for _ in range(2))
        self._ids = torch.randint(shape.vocab_size, (max_tokens,), generator=random, device=device)
        self._positions = torch.arange(max_tokens, device=device)
        self._backend = pick_backend(self._query)
        if self._backend is reference:
            raise UserError(f"flash attention on {device.type} does not support dtype {dtype}; choose another --dtype")

        config = TransformerConfig(shape)
        self._theta = config.rope_theta
        self._block, self._linear_block = Block(config), Block(config)
        self._linear_block.attention = _NoAttention(config)
        self._embedding, self._head = nn.Embedding(shape.vocab_size, shape.hidden), Head(config)
        for module in (self._block, self._linear_block, self._embedding, self._head):
            module.to(device, dtype)
            initialise_weights(module, layers=shape.layers, seed=0)

    def documents(self, length: int) -> tuple[Case, int]:
        """Attention over documents of ``length`` tokens, and how many there are."""
        count = max(1, self._fill_tokens // length)
        return self.attention(Runs.of_segments((length,) * count)), count

    def prefix(self, queries: int, keys: int) -> tuple[Case, int]:
        """Attention of ``queries`` tokens over all of ``keys`` tokens before them, and how many times it is done."""
        count = max(1, min(self._fill_tokens // queries, self._max_tokens // keys))
        return self.attention(Runs((queries,) * count, (keys,) * count, causal=False)), count

    def linear(self, tokens: int) -> Case:
        """One block without attention."""
        return self._through(self._linear_block, (tokens,))

    def block(self, segment_lengths: tuple[int, ...]) -> Case:
        """One block with attention inside segments."""
        return self._through(self._block, segment_lengths)

    def ends(self, tokens: int) -> tuple[Case, float]:
        """Rotary angles, embedding, head and loss, and the share of a micro-batch's tokens that went through."""
        scored = min(tokens, self._most_scored)
        ids, positions = self._ids[:scored], self._positions[:scored]
        target = LossTarget(ids, scored)

        def forward() -> Tensor:
            self._rotation(positions)
            return token_loss(self._head(self._embedding(ids)), target)

        return Case(forward, Tensor.backward), scored / tokens

    def attention(self, runs: Runs) -> Case:
        """Attention of any runs of at most ``max_tokens`` queries and keys."""
        queries, keys = sum(runs.query_lengths), sum(runs.key_lengths)
        query, grad_out = self._query[:queries], self._grad_out[:queries]
        key, value = self._key[:keys], self._value[:keys]

        def backward(forward_result: tuple[Tensor, Tensor]) -> None:
            self._backend.backward(grad_out, query, key, value, *forward_result, runs)

        return Case(lambda: self._backend.forward(query, key, value, runs), backward)

    def _through(self, block: Block, segment_lengths: tuple[int, ...]) -> Case:
        tokens = sum(segment_lengths)
        rotation = self._rotation(self._positions[:tokens])
        attend = partial(segment_attention, segment_lengths=segment_lengths)

        def forward() -> Tensor:
            stream = self._stream[:tokens].detach().requires_grad_()
            out: Tensor = block(stream, rotation, attend)
            return out

        # Parameters keep their gradients from call to call, which adds up as over the micro-batches of a step.
        return Case(forward, lambda out: out.backward(self._grad_stream[:tokens]))

    def _rotation(self, positions: Tensor) -> Rotation:
        return rotary_angles(positions, self.shape.head_dim, self._theta, self._stream.dtype)


class _NoAttention(Attention):
    """The projections and rotary embedding of attention, without attention."""

    def forward(self, x_TD: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        out: Tensor = self.wo(_Skip.apply(*self.project(x_TD, rotation)).flatten(-2))
        return out


class _Skip(torch.autograd.Function):
    """Returns the query; the gradients of key and value are some of the same shape, which cost nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.kv_heads = key.shape[1]
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad_key = grad_out[:, : ctx.kv_heads]
        return grad_out, grad_key, grad_key
