"""What moving keys and values between context-parallel ranks costs.

In every layer the forward brings a rank the K and V that it attends and other ranks hold, and the backward returns
their gradients the same way. A document that lies whole on one rank moves nothing. Links carry them while a rank
attends; but what travels is also brought together and taken apart in the rank's memory, and attention waits for that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from wlb.workload.base import Phase, Seconds
from wlb.workload.hardware import Hardware
from wlb.workload.links import group_link
from wlb.workload.shapes import ModelShape

EXCHANGES = 2  # of keys and values, and of their gradients, that are priced together
# Values read and written in memory for each value of K and V that a rank sends and each that it receives. Derived by
# counting the operations of ``wlb.attention``, each a kernel of its own. Forward: picking what is sent and stacking it,
# 4; lining up what arrived, 2. Backward: lining up again, clearing the gradients and putting them in place, 5; adding
# those that come home in float32, which counts twice where values are half as wide, 13.
_COPIES = {"forward": 6.0, "backward": 18.0, "both": 24.0}


@dataclass(frozen=True, slots=True)
class KvGather:
    """The K/V traffic of one GPU of a tensor-parallel group of ``tp``."""

    shape: ModelShape
    hardware: Hardware
    tp: int

    @property
    def _token_bytes(self) -> float:
        """Of the K and V of a token in one layer."""
        return 2 * self.shape.kv_heads * self.shape.head_dim / self.tp * self.hardware.bytes_per_value

    def seconds(self, tokens: ArrayLike, cp_size: int) -> Seconds:
        """Forward and backward, all layers, of receiving (or sending) ``tokens`` tokens in a group of ``cp_size``."""
        link = group_link(self.hardware, "all_to_all", cp_size, stride=self.tp)
        return EXCHANGES * self.shape.layers * link.seconds(np.asarray(tokens) * self._token_bytes)

    def copy_seconds(self, tokens: ArrayLike, phase: Phase = "both") -> Seconds:
        """All layers, of a rank that sends ``tokens`` tokens and receives as many."""
        seconds = self.shape.layers * _COPIES[phase] * self._token_bytes / self.hardware.memory_bandwidth
        return seconds * np.asarray(tokens, dtype=np.float64)
