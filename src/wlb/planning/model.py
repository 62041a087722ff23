"""What a model is beyond its shape: the trainer builds it, and ``config.json`` and ``[model]`` describe it."""

from __future__ import annotations

from dataclasses import dataclass

from wlb.errors import UserError
from wlb.workload.shapes import ModelShape


@dataclass(frozen=True)
class RotaryScaling:
    """Llama 3.1's stretching of positions to a longer context (``rope_type = "llama3"`` of Hugging Face's config).

    Frequencies that turn less than ``low_freq_factor`` times over ``original_max_position_embeddings`` tokens are
    divided by ``factor``, those that turn more than ``high_freq_factor`` times are kept, and those between are
    interpolated by how often they turn.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class TransformerConfig:
    """What a ``Transformer`` needs beyond its shape; see ``wlb.config.ModelConfig`` for the meaning.

    Raises ``UserError`` for heads that rotary positions cannot turn.
    """

    shape: ModelShape
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    rope_scaling: RotaryScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.shape.head_dim % 2:
            raise UserError(
                f"model head_dim = {self.shape.head_dim} is odd; rotary positions turn pairs of dimensions, choose an "
                "even one"
            )
