"""What the analytic workload model knows of a GPU: rates, and where each of them comes from.

Every number carries a label. Quoted: from the vendor's data sheet or the publication named. Measured: from
measurements described beside it. Derived: computed from those. Assumed: none of these; replace it by a measured
profile (``wlb.workload.profile``) where it matters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from wlb.errors import UserError


@dataclass(frozen=True)
class Hardware:
    """Achieved rates of one GPU (or CPU core) and of the links around it.

    Attention over a document of d tokens runs at ``attention_*_flops * d / (d + attention_half_length)``: short
    documents fill the kernel's tiles badly. A collective that moves n bytes through every GPU takes
    ``latency + n / bandwidth``.
    """

    peak_flops: float  # FLOP/s, dense, in the training type
    gemm_efficiency: float  # share of the peak that matrix multiplications of a transformer block reach
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
    memory_bytes: float  # of one GPU

    def link(self, gpus: int) -> tuple[float, float]:
        """Bandwidth (bytes/s) and latency (seconds) of a collective whose group reaches over ``gpus`` GPUs."""
        if gpus <= self.node_size:
            return self.node_bandwidth, self.node_latency
        return self.network_bandwidth, self.network_latency


# Quoted: best-shape bf16 GEMM of 268 TFLOP/s on A100 SXM (86% of peak) and 794 on H100/H200 SXM (80%), S. Bekman,
# "ML Engineering", table of maximum achievable matmul FLOPS. Assumed: a block's shapes reach 82% of the best.
_A100_GEMM_EFFICIENCY = 0.82 * 268 / 312
_HOPPER_GEMM_EFFICIENCY = 0.82 * 794 / 989

# Assumed: element-wise kernels reach 85% of the memory bandwidth, a collective 80% of its network adapter.
_MEMORY_EFFICIENCY = 0.85
_NETWORK_EFFICIENCY = 0.80

# Fitted to measured H100 causal attention, 64 query heads x 128, lengths 64 to 64K, 1 to 8-fold split heads:
# seconds = FLOPs / rate * (1 + half_length / d) + 24 us for each launch; error 5% (root mean square), 2.3% from
# 4K on. The launch is left out of the price: a packed micro-batch has one for all its documents.
_HOPPER_ATTENTION_FORWARD = 342e12
_ATTENTION_HALF_LENGTH = 906.0
# Quoted: FlashAttention-2's backward on H100, head_dim 128, 16K tokens (FlashAttention-3, arXiv 2407.08608,
# backward speed figure); taken as the rate at unbounded length.
_HOPPER_ATTENTION_BACKWARD = 322e12

# Derived from measured all-gathers over 8 H200 (bus bandwidth 112 GB/s at 8 MB, 300 at 64 MB, 365 above 1 GB):
# latency + bytes / bandwidth with these two meets all three within 5%. Hopper's NVLink is quoted at 450 GB/s each
# way, of which this is 82%; assumed: reduce-scatter is as fast, and A100 reaches the same share of its 300 GB/s.
_NODE_LATENCY = 45e-6
_HOPPER_NODE_BANDWIDTH = 370e9
_A100_NODE_BANDWIDTH = 0.82 * 300e9
# Assumed.
_NETWORK_LATENCY = 60e-6

_H100 = Hardware(
    peak_flops=989e12,  # quoted: NVIDIA H100 SXM data sheet, bf16 dense
    gemm_efficiency=_HOPPER_GEMM_EFFICIENCY,
    attention_forward_flops=_HOPPER_ATTENTION_FORWARD,
    attention_backward_flops=_HOPPER_ATTENTION_BACKWARD,
    attention_half_length=_ATTENTION_HALF_LENGTH,
    memory_bandwidth=_MEMORY_EFFICIENCY * 3.35e12,  # quoted: H100 SXM data sheet
    node_size=8,
    node_bandwidth=_HOPPER_NODE_BANDWIDTH,
    node_latency=_NODE_LATENCY,
    network_bandwidth=_NETWORK_EFFICIENCY * 50e9,  # quoted: DGX H100, one 400 Gb/s adapter for each GPU
    network_latency=_NETWORK_LATENCY,
    bytes_per_value=2,
    memory_bytes=80e9,  # quoted: H100 SXM data sheet, 80 GB
)

HARDWARE: dict[str, Hardware] = {
    "a100": Hardware(
        peak_flops=312e12,  # quoted: NVIDIA A100 80GB SXM data sheet, bf16 dense
        gemm_efficiency=_A100_GEMM_EFFICIENCY,
        # Assumed, between the 50% and 73% of peak that FlashAttention-2 reports on A100 (arXiv 2307.08691).
        attention_forward_flops=0.65 * 312e12,
        attention_backward_flops=0.57 * 312e12,
        attention_half_length=_ATTENTION_HALF_LENGTH,  # assumed: as on H100
        memory_bandwidth=_MEMORY_EFFICIENCY * 2.039e12,  # quoted: A100 80GB SXM data sheet
        node_size=8,
        node_bandwidth=_A100_NODE_BANDWIDTH,
        node_latency=_NODE_LATENCY,
        network_bandwidth=_NETWORK_EFFICIENCY * 25e9,  # quoted: DGX A100, one 200 Gb/s adapter for each GPU
        network_latency=_NETWORK_LATENCY,
        bytes_per_value=2,
        memory_bytes=80e9,  # quoted: NVIDIA A100 data sheet, 80 GB
    ),
    "h100": _H100,
    # The same chip with faster and more memory; quoted: NVIDIA H200 data sheet.
    "h200": replace(_H100, memory_bandwidth=_MEMORY_EFFICIENCY * 4.8e12, memory_bytes=141e9),
    # Measured on one core of an AMD EPYC (family 26) with torch 2.13.0, one thread, float32: matrix products,
    # norms, rotary embedding and SwiGLU of a block of hidden size 128, torch's flash attention over 4 heads x 32
    # for 16 to 8,192 tokens (attention and linear part of a document together within 10%), and gloo between
    # two processes for 1 MB and more.
    "cpu": Hardware(
        peak_flops=115e9,
        gemm_efficiency=0.93,
        attention_forward_flops=81e9,
        attention_backward_flops=79e9,
        attention_half_length=170.0,
        memory_bandwidth=5e9,
        node_size=64,  # assumed: all processes on one machine
        node_bandwidth=1.7e9,
        node_latency=100e-6,
        network_bandwidth=1.7e9,
        network_latency=100e-6,
        bytes_per_value=4,
        memory_bytes=4e9,  # assumed
    ),
}


def hardware_preset(name: str) -> Hardware:
    """Return the preset ``name``; raises ``UserError`` that lists the presets."""
    try:
        return HARDWARE[name]
    except KeyError:
        raise UserError(f"unknown hardware {name!r}; choose one of {', '.join(HARDWARE)}") from None
