"""A model in full, as it is trained: its shape, and what else its mathematics depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from wlb.errors import UserError
from wlb.settings import Number, Section, Tokens
from wlb.workload.shapes import ModelShape

# The settings that each rope_type reads. The first of them have no default in Hugging Face's config.json:
# llama3: frequencies that turn less than low_freq_factor times over the original context are divided by factor, those
# that turn more than high_freq_factor times are kept, and those between are interpolated by how often they turn.
# linear: all are divided (arXiv 2306.15595). yarn: those that turn at least beta_fast times are kept, those that turn
# at most beta_slow times are divided, and over the pairs of dimensions between it ramps (arXiv 2309.00071, section 3).
ROPE_REQUIRED = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate")}


class RopeScalingConfig(Section):
    """Rotary positions stretched to a longer context, with the names and meanings of Hugging Face's config.json."""

    rope_type: Literal["llama3", "linear", "yarn"] = Field(
        "llama3", description="Llama 3.1's, position interpolation, or YaRN"
    )
    factor: Number = Field(8.0, ge=1, description="Ratio of the contexts")
    low_freq_factor: Number = Field(1.0, gt=0, description="With llama3")
    high_freq_factor: Number = Field(4.0, gt=0, description="With llama3")
    original_max_position_embeddings: Tokens = Field(8192, description="Not with linear")
    beta_fast: Number = Field(32.0, ge=1e-6, le=1e6, description="With yarn")
    beta_slow: Number = Field(1.0, ge=1e-6, le=1e6, description="With yarn")
    attention_factor: Number | None = Field(None, gt=0, description="With yarn; default: 0.1 ln(factor) + 1")
    truncate: bool = Field(True, description="With yarn")

    @model_validator(mode="after")
    def _check(self) -> RopeScalingConfig:
        for name in sorted(self.model_fields_set - self.in_effect.keys()):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} has no effect with rope_type = {self.rope_type!r}; leave it out")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast = {self.beta_fast} must be over beta_slow = {self.beta_slow}")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor} must be over low_freq_factor = {self.low_freq_factor}"
            )
        return self

    @property
    def in_effect(self) -> dict[str, Any]:
        """The settings that ``rope_type`` reads, as ``config.json`` has them."""
        names = ("rope_type", *ROPE_REQUIRED[self.rope_type], *_OPTIONAL.get(self.rope_type, ()))
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def length(self) -> float:
        """What multiplies cosine and sine."""
        if self.rope_type != "yarn":
            return 1.0
        return yarn_length(self.factor) if self.attention_factor is None else self.attention_factor

    def ramp(self, theta: float, pairs: int) -> tuple[float, float]:
        """Where YaRN's ramp over ``pairs`` pairs of dimensions begins and ends, for frequencies of base ``theta``.

        With ``truncate`` both ends are whole pairs. Raises ``UserError`` where it would end before it begins, and so
        divide what is to be kept, or the reverse.
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


def yarn_length(factor: float, scale: float = 1.0) -> float:
    """YaRN's length of cosine and sine (section 3.4), by ``mscale`` where Hugging Face's config has it."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class TransformerConfig:
    """What a ``Transformer`` needs beyond its shape; see ``wlb.job.config.ModelConfig`` for the meaning.

    Raises ``UserError`` for heads that rotary positions cannot turn, and for frequencies that they cannot have.
    """

    shape: ModelShape
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    rope_scaling: RopeScalingConfig | None = None
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
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "yarn":
            self.rope_scaling.ramp(self.rope_theta, self.shape.head_dim // 2)
