"""Rotary positions: what angle every pair of a head's dimensions is turned by, and the turning.

Shapes: T tokens · H heads · E head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wlb.planning.model import RotaryScaling


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine of every token's rotary angles, (T, 1, E), the same for both halves of a head."""

    cos_T1E: Tensor
    sin_T1E: Tensor


def rotary_angles(
    positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype, *, scaling: RotaryScaling | None = None
) -> Rotation:
    """Rotary position angles (RoFormer, arXiv 2104.09864, section 3.2.2), pairing dimension e with e + E/2.

    Computed in float64 for every ``dtype``: at position 100,000 a float32 angle is off by about 0.004.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_T.device) / head_dim
    frequencies = theta**-exponents
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling)
    angles_TE = (positions_T[:, None] * frequencies).repeat(1, 2)
    return Rotation(angles_TE.cos().to(dtype)[:, None], angles_TE.sin().to(dtype)[:, None])


def rotate(x_THE: Tensor, rotation: Rotation) -> Tensor:
    """Turn every head's pairs of dimensions by the token's angles."""
    first, second = x_THE.chunk(2, dim=-1)
    return x_THE * rotation.cos_T1E + torch.cat((-second, first), dim=-1) * rotation.sin_T1E


def _scaled(frequencies: Tensor, scaling: RotaryScaling) -> Tensor:
    turns = frequencies * scaling.original_max_position_embeddings / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0.0, 1.0))
