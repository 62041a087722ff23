"""What moving keys and values between context-parallel ranks costs.

In every layer the forward brings a rank the K and V that it attends and other ranks hold, and the backward returns
their gradients the same way. A document that lies whole on one rank moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from wlb.workload.base import Seconds
from wlb.workload.hardware import Hardware
from wlb.workload.model_shapes import ModelShape


@dataclass(frozen=True, slots=True)
class KvGather:
    """The K/V traffic of one GPU of a tensor-parallel group of ``tp``."""

    shape: ModelShape
    hardware: Hardware
    tp: int

    def seconds(self, tokens: ArrayLike, cp_size: int) -> Seconds:
        """Forward and backward, all layers, of receiving (or sending) ``tokens`` tokens in a group of ``cp_size``."""
        bandwidth, latency = self.hardware.link(self.tp * cp_size)
        token_bytes = 2 * self.shape.kv_heads * self.shape.head_dim / self.tp * self.hardware.bytes_per_value
        count = np.asarray(tokens, dtype=np.float64)
        return np.where(count > 0, 2 * self.shape.layers * (latency + count * token_bytes / bandwidth), 0.0)
