"""A Llama-style decoder that runs on packed micro-batches and knows nothing of parallelism.

A micro-batch is one run of T tokens; there is no batch dimension and no padding. Token ids become vectors
(embedding), pass the blocks (RMSNorm, grouped-query attention with rotary positions, RMSNorm, SwiGLU), and become
scores over the vocabulary (RMSNorm, output head, not tied to the embedding). Tokens meet only in the function
``attend`` that comes with the micro-batch: it knows the segments, and who holds which of their tokens.

A ``Transformer`` may hold only some of the blocks: then it is one stage of a pipeline, takes or returns the
residual stream at its cut ends, and still names its parameters as the full model does
(``layers.7.attention.wq.weight``).

Shapes: T tokens · D hidden · H query heads · G key/value heads · E head_dim · F ffn_hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wlb.errors import UserError
from wlb.workload.model_shapes import ModelShape

# Query (T, H, E), key and value (T, G, E) to output (T, H, E), causally and inside segments.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TransformerConfig:
    """What a ``Transformer`` needs beyond its shape; see ``wlb.config.ModelConfig`` for the meaning."""

    shape: ModelShape
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5


class Transformer(nn.Module):
    """The blocks in ``layers`` of a decoder, the embedding before the first and the head after the last."""

    def __init__(self, config: TransformerConfig, layers: range | None = None) -> None:
        super().__init__()
        shape = config.shape
        if shape.head_dim % 2:
            raise UserError(f"model head_dim = {shape.head_dim} is odd; rotary positions turn pairs of dimensions")
        layers = range(shape.layers) if layers is None else layers
        self.config = config
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(layer): Block(config) for layer in layers})
        self.head = Head(config) if layers.stop == shape.layers else None

    def forward(self, x: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Run the blocks on one micro-batch.

        Args:
            x: Token ids (T,) if this holds the embedding, else the residual stream (T, D).
            positions_T: Position of each token in its segment.
            attend: Attention over the segments of the micro-batch.

        Returns:
            Scores (T, V) if this holds the head, else the residual stream (T, D).
        """
        x_TD: Tensor = x if self.embedding is None else self.embedding(x)
        rotation = rotary_angles(positions_T, self.config.shape.head_dim, self.config.rope_theta, x_TD.dtype)
        for block in self.layers.values():
            x_TD = block(x_TD, rotation, attend)
        out: Tensor = x_TD if self.head is None else self.head(x_TD)
        return out


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        shape = config.shape
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=config.norm_eps)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.hidden, eps=config.norm_eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, x_TD: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), rotation, attend)
        out_TD: Tensor = x_TD + self.feed_forward(self.feed_forward_norm(x_TD))
        return out_TD


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, inside segments."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.wq = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.wk = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.wv = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.wo = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x_TD: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        # -1 rather than the head counts: a tensor-parallel rank holds only some of the heads.
        q_THE = self.wq(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TGE = self.wk(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TGE = self.wv(x_TD).unflatten(-1, (-1, self.head_dim))
        out_THE = attend(rotate(q_THE, rotation), rotate(k_TGE, rotation), v_TGE)
        out: Tensor = self.wo(out_THE.flatten(-2))
        return out


class FeedForward(nn.Module):
    """SwiGLU: (silu(x W1) * x W3) W2."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.hidden, shape.ffn_hidden, bias=False)
        self.w2 = nn.Linear(shape.ffn_hidden, shape.hidden, bias=False)
        self.w3 = nn.Linear(shape.hidden, shape.ffn_hidden, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.w2(F.silu(self.w1(x_TD)) * self.w3(x_TD))
        return out_TD


class Head(nn.Module):
    """The final norm and the projection to scores over the vocabulary."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.shape.hidden, eps=config.norm_eps)
        self.output = nn.Linear(config.shape.hidden, config.shape.vocab_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        scores_TV: Tensor = self.output(self.norm(x_TD))
        return scores_TV


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine of every token's rotary angles, (T, 1, E), the same for both halves of a head."""

    cos_T1E: Tensor
    sin_T1E: Tensor


def rotary_angles(positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Rotary position angles (RoFormer, arXiv 2104.09864, section 3.2.2), pairing dimension e with e + E/2.

    Computed in float64 for every ``dtype``: at position 100,000 a float32 angle is off by about 0.004.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_T.device) / head_dim
    angles_TE = (positions_T[:, None] * theta**-exponents).repeat(1, 2)
    return Rotation(angles_TE.cos().to(dtype)[:, None], angles_TE.sin().to(dtype)[:, None])


def rotate(x_THE: Tensor, rotation: Rotation) -> Tensor:
    """Turn every head's pairs of dimensions by the token's angles."""
    first, second = x_THE.chunk(2, dim=-1)
    return x_THE * rotation.cos_T1E + torch.cat((-second, first), dim=-1) * rotation.sin_T1E
