"""The full description of a model beyond its shape, from ``config.json`` or ``[model]``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wlb.errors import UserError
from wlb.planning.rotary import RotaryScaling as RotaryScaling
from wlb.planning.rotary import Scaling, YarnScaling
from wlb.workload.shapes import ModelShape


@dataclass(frozen=True)
class TransformerConfig:
    """What a ``Transformer`` needs beyond its shape; see ``wlb.config.ModelConfig`` for the meaning.

    Raises ``UserError`` for heads that rotary positions cannot turn, and for frequencies that they cannot have.
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
        if not 1 < self.rope_theta < math.inf:
            raise UserError(
                f"model rope_theta = {self.rope_theta} is no base of rotary frequencies; give a number over 1, such as "
                "10000"
            )
        if isinstance(self.rope_scaling, YarnScaling):
            self.rope_scaling.ramp(self.rope_theta, self.shape.head_dim // 2)
