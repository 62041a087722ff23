"""What moving keys and values between context-parallel ranks costs.

In every layer the forward gathers K and V of the tokens that other ranks attend, and the backward reduce-scatters their
gradients the same way. A document that lies whole on one rank moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from wlb.workload.hardware import Hardware
from wlb.workload.model_shapes import ModelShape


@dataclass(frozen=True, slots=True)
class KvGather:
    """The K/V traffic of one GPU of a tensor-parallel group of ``tp``."""

    shape: ModelShape
    hardware: Hardware
    tp: int

    def seconds(self, tokens: int, cp_size: int) -> float:
        """Forward and backward, all layers, of ``tokens`` tokens spread over ``cp_size`` ranks; not overlapped."""
        if cp_size == 1 or tokens == 0:
            return 0.0
        bandwidth, latency = self.hardware.link(self.tp * cp_size)
        token_bytes = 2 * self.shape.kv_heads * self.shape.head_dim / self.tp * self.hardware.bytes_per_value
        received = tokens * token_bytes * (cp_size - 1) / cp_size
        return 2 * self.shape.layers * (latency + received / bandwidth)
