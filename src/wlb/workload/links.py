"""How long the messages of a process group take: which links they use, and at what rate.

GPUs are numbered with tensor-parallel ranks next to each other, then context-, data- and pipeline-parallel ones
(``wlb.training.parallel.mesh.build_mesh``), and a node holds ``Hardware.node_size`` of them in a row. Inside a
node every message takes NVLink. Between nodes each GPU has one network adapter, and the traffic decides how many
adapters carry the bytes of a rank:

* ``all_gather``, also reduce-scatter: the rings of NCCL pass every byte through every rank and enter a node over the
  adapters of all its ranks in the group, so the bandwidth is the sum of these adapters.
* ``all_to_all``: bytes for other nodes leave by the adapter of the rank; bytes for its own node take NVLink meanwhile.
* ``point_to_point``: one adapter.

The latency of a message grows with its steps: the ranks of a ring, or the peers of an all-to-all. Rates are fitted to
published measurements; tests/workload/published_measurements.md has the error at each size.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.workload.hardware import Hardware

Traffic = Literal["all_gather", "all_to_all", "point_to_point"]


class Link(NamedTuple):
    """The link over which every rank of a group sends its bytes."""

    latency: float  # seconds
    bandwidth: float  # bytes/s that a rank receives from others

    def seconds(self, received_bytes: ArrayLike) -> NDArray[np.float64]:
        """Seconds of messages of ``received_bytes`` from other ranks; same shape, 0 for no bytes."""
        count = np.asarray(received_bytes, dtype=np.float64)
        return np.where(count > 0, self.latency + count / self.bandwidth, 0.0)


def group_link(hardware: Hardware, traffic: Traffic, size: int, stride: int, nodes: int | None = None) -> Link:
    """The link of a group of ``size`` ranks, each ``stride`` GPUs after the last, or spread over ``nodes`` nodes.

    The group starts at the beginning of a node and, if it needs several, has the same number of ranks on each.
    """
    nodes = nodes or min(size, math.ceil(size * stride / hardware.node_size))
    steps = 1 if traffic == "point_to_point" else size - 1
    peers = 1.0 if traffic == "point_to_point" else max(1.0, size / nodes - 1)  # rings use all links of a node
    inside = min(hardware.node_bandwidth, peers * hardware.peer_bandwidth)
    if nodes == 1:
        return Link(hardware.node_latency + steps * hardware.step_latency, inside)
    match traffic:
        case "all_gather":
            adapters = size / nodes
        case "all_to_all":  # the adapter reaches size - size / nodes of the size - 1 peers of a rank
            adapters = (size - 1) / (size - size / nodes)
        case "point_to_point":
            adapters = 1.0
    bandwidth = min(adapters * hardware.network_bandwidth, inside)
    return Link(hardware.network_latency + steps * hardware.step_latency, bandwidth)


def shard_bytes(whole_bytes: float, ranks: int) -> float:
    """Bytes that a rank receives when ``ranks`` ranks gather (or reduce-scatter) ``whole_bytes``."""
    return whole_bytes * (ranks - 1) / ranks
