"""Which wires a process group communicates over.

GPUs are numbered with tensor-parallel ranks next to each other, then context-, data- and pipeline-parallel ones
(``wlb.training.parallelize.build_mesh``), and a node holds ``Hardware.node_size`` of them in a row. A group whose ranks
all lie in one node uses the node's links. Any other is as fast as what its ranks on a node get out of it together:
each GPU has one network adapter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.workload.hardware import Hardware


class Link(NamedTuple):
    """What every rank of a group moves its bytes over."""

    latency: float  # seconds
    bandwidth: float  # bytes/s

    def seconds(self, number_of_bytes: ArrayLike) -> NDArray[np.float64]:
        """Of a message or collective that moves so many bytes through every rank; nothing takes no time."""
        count = np.asarray(number_of_bytes, dtype=np.float64)
        return np.where(count > 0, self.latency + count / self.bandwidth, 0.0)


def group_link(hardware: Hardware, size: int, stride: int) -> Link:
    """The link of a group of ``size`` ranks, each ``stride`` GPUs after the one before."""
    if size * stride <= hardware.node_size:
        return Link(hardware.node_latency, hardware.node_bandwidth)
    on_a_node = max(1, hardware.node_size // stride)
    bandwidth = min(on_a_node * hardware.network_bandwidth, hardware.node_bandwidth)
    return Link(hardware.network_latency, bandwidth)


def shard_bytes(whole_bytes: float, ranks: int) -> float:
    """What a rank sends (and receives) when ``ranks`` of them gather or reduce ``whole_bytes``."""
    return whole_bytes * (ranks - 1) / ranks
