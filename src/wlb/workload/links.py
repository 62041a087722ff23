"""How long a process group's messages take: which links they use, and at what rate.

GPUs are numbered with tensor-parallel ranks next to each other, then context-, data- and pipeline-parallel ones
(``wlb.training.parallel.mesh.build_mesh``), and a node holds ``Hardware.node_size`` of them in a row. Inside a
node every message takes NVLink. Between nodes each GPU has one network adapter, and how many adapters carry a rank's
bytes depends on the traffic:

* ``all_gather``, also reduce-scatter: NCCL's rings pass every byte through every rank and enter a node over all
  adapters of the group's ranks there, so the bandwidth is that of these adapters together.
* ``all_to_all``: a rank's bytes for other nodes leave by its own adapter; those for its own node take NVLink meanwhile.
* ``point_to_point``: one adapter.

Each message pays a latency that grows with its steps: the ranks a ring passes or the peers of an all-to-all. The
rates are fitted to published measurements; tests/workload/published_measurements.md has the error at each size.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.workload.hardware import Hardware

Traffic = Literal["all_gather", "all_to_all", "point_to_point"]


class Link(NamedTuple):
    """What every rank of a group moves its bytes over."""

    latency: float  # seconds
    bandwidth: float  # bytes/s, of the bytes that a rank receives from others

    def seconds(self, received_bytes: ArrayLike) -> NDArray[np.float64]:
        """Of messages by which a rank receives so many bytes from others; same shape, 0 for nothing."""
        count = np.asarray(received_bytes, dtype=np.float64)
        return np.where(count > 0, self.latency + count / self.bandwidth, 0.0)


def group_link(hardware: Hardware, traffic: Traffic, size: int, stride: int, nodes: int | None = None) -> Link:
    """The link of a group of ``size`` ranks, each ``stride`` GPUs after the one before; or that lie on ``nodes`` nodes.

    The group starts with its node and, where it needs more than one, has equally many ranks on each.
    """
    nodes = nodes or min(size, math.ceil(size * stride / hardware.node_size))
    steps = 1 if traffic == "point_to_point" else size - 1
    inside = min(hardware.node_bandwidth, _peers(traffic, size / nodes) * hardware.peer_bandwidth)
    if nodes == 1:
        return Link(hardware.node_latency + steps * hardware.step_latency, inside)
    bandwidth = _adapters(traffic, size, size / nodes) * hardware.network_bandwidth
    return Link(hardware.network_latency + steps * hardware.step_latency, min(bandwidth, inside))


def shard_bytes(whole_bytes: float, ranks: int) -> float:
    """What a rank receives when ``ranks`` of them gather (or reduce and scatter) ``whole_bytes``."""
    return whole_bytes * (ranks - 1) / ranks


def _peers(traffic: Traffic, on_a_node: float) -> float:
    """GPUs of its node that a rank receives from at once; rings run over all their links."""
    return 1.0 if traffic == "point_to_point" else max(1.0, on_a_node - 1)


def _adapters(traffic: Traffic, size: int, on_a_node: float) -> float:
    """Bandwidth of a group with ``on_a_node`` of its ``size`` ranks on each of several nodes, in adapters."""
    match traffic:
        case "all_gather":
            return on_a_node
        case "all_to_all":  # of a rank's size - 1 peers, size - on_a_node are reached by its adapter
            return (size - 1) / (size - on_a_node)
        case "point_to_point":
            return 1.0
