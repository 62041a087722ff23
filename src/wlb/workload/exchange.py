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
# Values read and written in a rank's memory, by counting the operations of ``wlb.attention``, each a kernel of its own.
# For each value of K and V that it sends: picking and stacking it, 4; its gradient, when it comes home, is added in
# float32, which counts twice where values are half as wide, 13.
_SENT = {"forward": 4.0, "backward": 13.0, "both": 17.0}
# For each that it receives: lining it up, 2; backward again, and clearing the gradients and putting them in place, 3.
_RECEIVED = {"forward": 2.0, "backward": 5.0, "both": 7.0}
# For each value of a query that attends a part of what was received: picking it, 2, and merging two outputs in float32,
# 19; backward, picking query, output and its gradient, 6, and adding the query's, 7.
_MERGED = {"forward": 21.0, "backward": 13.0, "both": 34.0}


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

    def copy_seconds(self, sent: ArrayLike, received: ArrayLike, merged: ArrayLike, phase: Phase = "both") -> Seconds:
        """All layers, of ranks that send and receive so many tokens, and ``merged`` of which attend part by part."""
        moved = _SENT[phase] * np.asarray(sent) + _RECEIVED[phase] * np.asarray(received)
        query_bytes = self.shape.heads * self.shape.head_dim / self.tp * self.hardware.bytes_per_value
        touched = self._token_bytes * moved + query_bytes * _MERGED[phase] * np.asarray(merged)
        seconds: Seconds = self.shape.layers / self.hardware.memory_bandwidth * touched
        return seconds
