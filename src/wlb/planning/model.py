"""The full description of a model beyond its shape, from ``config.json`` or ``[model]``."""

from __future__ import annotations

from dataclasses import dataclass

from wlb.errors import UserError
from wlb.planning.rotary import RotaryScaling as RotaryScaling
from wlb.planning.rotary import Scaling
from wlb.workload.shapes import ModelShape


@dataclass(frozen=True)
class TransformerConfig:
    """What a ``Transformer`` needs beyond its shape; see ``wlb.config.ModelConfig`` for the meaning.

    Raises ``UserError`` for heads that rotary positions cannot turn.
    """

    shape: ModelShape
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    rope_scaling: Scaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    o_bias: bool = False

    def window_of(self, layer: int) -> int | None:
        """Tokens that ``layer`` attends up to each token; None where that is all of its segment."""
        return self.shape.sliding_window if self.shape.block_kind(layer).attention == "sliding" else None

    def __post_init__(self) -> None:
        if self.shape.head_dim % 2:
            raise UserError(
                f"model head_dim = {self.shape.head_dim} is odd; rotary positions turn pairs of dimensions, choose an "
                "even one"
            )
