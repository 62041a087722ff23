"""What a model is beyond its shape: the trainer builds it, and ``config.json`` and ``[model]`` describe it."""

from __future__ import annotations

from dataclasses import dataclass

from wlb.errors import UserError
from wlb.planning.rotary import RotaryScaling as RotaryScaling
from wlb.planning.rotary import Scaling
from wlb.workload.shapes import ModelShape


@dataclass(frozen=True)
class TransformerConfig:
    """What a ``Transformer`` needs beyond its shape; see ``wlb.config.ModelConfig`` for the meaning.

    Raises ``UserError`` for heads that rotary positions cannot turn, and for windows that no layer has.
    """

    shape: ModelShape
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    rope_scaling: Scaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    o_bias: bool = False
    sliding_window: int | None = None
    full_attention_layers: int = 0

    def window_of(self, layer: int) -> int | None:
        """Tokens that ``layer`` attends up to each token; None where that is all of its segment."""
        return self.sliding_window if layer >= self.full_attention_layers else None

    def __post_init__(self) -> None:
        if self.shape.head_dim % 2:
            raise UserError(
                f"model head_dim = {self.shape.head_dim} is odd; rotary positions turn pairs of dimensions, choose an "
                "even one"
            )
        if self.full_attention_layers and self.sliding_window is None:
            raise UserError(
                f"model full_attention_layers = {self.full_attention_layers} needs sliding_window, which is not set"
            )
