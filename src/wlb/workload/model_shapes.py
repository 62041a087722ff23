"""Shapes of the language models that the workload model prices and the trainer builds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and a SwiGLU feed-forward layer.

    ``layers`` counts all blocks of the model, ``head_dim`` is the width of one attention head.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab_size: int
