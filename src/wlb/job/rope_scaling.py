"""Settings of rotary positions that are stretched to a longer context: ``[model.rope_scaling]``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from wlb.settings import Number, Section, Tokens

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
