"""The full description of a model beyond its shape, from ``config.json`` or ``[model]``.

Part of it is how rotary positions are stretched to a longer context.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from wlb.errors import UserError
from wlb.job.config import RopeScalingConfig
from wlb.workload.shapes import ModelShape


@dataclass(frozen=True)
class RotaryScaling:
    """Llama 3.1's stretching of positions to a longer context (``rope_type = "llama3"`` of Hugging Face's config).

    Frequencies that turn less than ``low_freq_factor`` times over ``original_max_position_embeddings`` tokens are
    divided by ``factor``, those that turn more than ``high_freq_factor`` times are kept, and those between are
    interpolated by how often they turn.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): every frequency is divided by ``factor``."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071, section 3).

    Frequencies that turn at least ``beta_fast`` times over ``original_max_position_embeddings`` tokens are kept, those
    that turn at most ``beta_slow`` times are divided by ``factor``, and over the pairs of dimensions between it ramps;
    with ``truncate`` the ends of the ramp are whole pairs. Cosine and sine are multiplied by ``attention_factor``, by
    default 0.1 ln(factor) + 1.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def length(self) -> float:
        """Of cosine and sine."""
        return yarn_length(self.factor) if self.attention_factor is None else self.attention_factor

    def ramp(self, theta: float, pairs: int) -> tuple[float, float]:
        """Where the ramp over ``pairs`` pairs of dimensions begins and ends, for frequencies of base ``theta``.

        Raises ``UserError`` where it would end before it begins, and so divide what is to be kept, or the reverse.
        """

        def pair_that_turns(times: float) -> float:
            """The pair of dimensions, as a fraction, that turns so many times over the original context."""
            return pairs * math.log(self.original_max_position_embeddings / (times * 2 * math.pi)) / math.log(theta)

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        if last < first:
            raise UserError(
                f"yarn with beta_fast = {self.beta_fast:g}, beta_slow = {self.beta_slow:g} and an original context of "
                f"{self.original_max_position_embeddings} tokens has no ramp over the frequencies of rope_theta = "
                f"{theta:g}; correct them"
            )
        return first, last


Scaling: TypeAlias = RotaryScaling | LinearScaling | YarnScaling
SCALINGS: dict[str, type[Scaling]] = {"llama3": RotaryScaling, "linear": LinearScaling, "yarn": YarnScaling}


def yarn_length(factor: float, scale: float = 1.0) -> float:
    """YaRN's length of cosine and sine (section 3.4), by ``mscale`` where Hugging Face's config has it."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def scaling_of(section: RopeScalingConfig | None) -> Scaling | None:
    """The scaling that [model.rope_scaling] describes."""
    if section is None:
        return None
    scaling = SCALINGS[section.rope_type]
    return scaling(**{name: getattr(section, name) for name in scaling.__dataclass_fields__})


def scaling_json(scaling: Scaling) -> dict[str, Any]:
    """``rope_scaling`` of ``config.json``."""
    (kind,) = (name for name, known in SCALINGS.items() if type(scaling) is known)
    return {"rope_type": kind, **{name: value for name, value in asdict(scaling).items() if value is not None}}


@dataclass(frozen=True)
class TransformerConfig:
    """What a ``Transformer`` needs beyond its shape; see ``wlb.job.config.ModelConfig`` for the meaning.

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
