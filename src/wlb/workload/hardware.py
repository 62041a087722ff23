"""What the analytic workload model knows of a GPU: rates, and where each of them comes from.

Quoted figures are from the vendor's data sheet or a named publication, measured ones from measurements that
are described beside them, assumed ones are neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from wlb.errors import UserError


@dataclass(frozen=True)
class Hardware:
    """Achieved rates of one GPU (or CPU core) and of the links around it.

    Attention over a document of d tokens runs at ``attention_* x d / (d + attention_half_length)``: short
    documents fill the kernel's tiles badly. A collective that moves n bytes through every GPU takes
    ``latency + n / bandwidth``.
    """

    peak_flops: float  # FLOP/s, dense, in the training type; the denominator of MFU
    gemm_flops: float  # FLOP/s of large matrix multiplications
    attention_forward_flops: float  # FLOP/s at unbounded length
    attention_backward_flops: float
    attention_half_length: float  # tokens at which half of that is reached
    memory_bandwidth: float  # bytes/s of element-wise kernels
    node_size: int  # GPUs joined by the fast links
    node_bandwidth: float  # bytes/s of bus bandwidth inside a node
    node_latency: float  # seconds
    network_bandwidth: float  # bytes/s of each GPU between nodes
    network_latency: float  # seconds
    bytes_per_value: int  # of an activation


HARDWARE: dict[str, Hardware] = {
    "a100": Hardware(
        peak_flops=312e12,
        gemm_flops=250e12,
        attention_forward_flops=190e12,
        attention_backward_flops=170e12,
        attention_half_length=906.0,
        memory_bandwidth=0.85 * 2.04e12,
        node_size=8,
        node_bandwidth=230e9,
        node_latency=45e-6,
        network_bandwidth=20e9,
        network_latency=60e-6,
        bytes_per_value=2,
    ),
    "h100": Hardware(
        peak_flops=989e12,
        gemm_flops=650e12,
        attention_forward_flops=342e12,
        attention_backward_flops=325e12,
        attention_half_length=906.0,
        memory_bandwidth=0.85 * 3.35e12,
        node_size=8,
        node_bandwidth=370e9,
        node_latency=45e-6,
        network_bandwidth=40e9,
        network_latency=60e-6,
        bytes_per_value=2,
    ),
}


def hardware_preset(name: str) -> Hardware:
    """Return the preset ``name``; raises ``UserError`` that lists the presets."""
    try:
        return HARDWARE[name]
    except KeyError:
        raise UserError(f"unknown hardware {name!r}; choose one of {', '.join(HARDWARE)}") from None
