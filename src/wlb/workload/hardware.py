"""Hardware presets of the analytic workload model: rates and their sources.

Every number has a label. Quoted: from the data sheet or the publication named. Measured: by the measurements described
beside it. Derived: computed from such numbers. Assumed: none of these; measure a profile (``wlb.workload.profile``) if
it matters.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from wlb.errors import UserError, choose_from


@dataclass(frozen=True)
class AttentionKernel:
    """Rates of one generation of attention kernels on one device.

    Attention over a document of d tokens runs at ``*_flops * d / (d + half length)``, because short documents fill
    tiles badly. While the last tiles of a forward finish, other processors are idle: for the time of ``drain_tiles``
    tiles of queries over all keys of the longest document, whatever the number of heads. A backward begins with the
    longest tiles, so it has no such tail.
    """

    forward_flops: float  # FLOP/s at unbounded length
    backward_flops: float
    forward_half_length: float  # tokens at which half of that rate is reached
    backward_half_length: float
    drain_tiles: float = 0.0

    def times(self, speed: float) -> Self:
        """The same kernel at ``speed`` times its rates."""
        return replace(self, forward_flops=self.forward_flops * speed, backward_flops=self.backward_flops * speed)


@dataclass(frozen=True)
class Hardware:
    """Achieved rates of one GPU (or CPU core) and of the links around it.

    ``wlb.workload.links`` turns the rates of links into those of a process group.
    """

    peak_flops: float  # FLOP/s, dense, in the training type
    gemm_efficiency: float  # share of the peak that matrix multiplications of a transformer block reach
    attention: AttentionKernel
    memory_bandwidth: float  # bytes/s of element-wise kernels
    node_size: int  # GPUs joined by the fast links
    node_bandwidth: float  # bytes/s that each GPU receives inside a node
    node_latency: float  # seconds
    network_bandwidth: float  # bytes/s of each GPU's adapter between nodes
    network_latency: float  # seconds
    step_latency: float  # seconds for each further rank of a ring, or peer of an all-to-all
    bytes_per_value: int  # of an activation
    memory_bytes: float  # of one GPU
    device_type: str = "cuda"  # as torch calls it
    peer_bandwidth: float = math.inf  # bytes/s between two GPUs of a node, if each pair has its own link
    wide_rates: tuple[tuple[str, float], ...] = ()  # wider types, and their peak over the preset's
    exposed: float = 0.0  # unhidden share of an overlapped collective: both use the same processors and memory

    def computing_in(self, dtype: str) -> Self:
        """The same device computing in ``dtype``: values have another size, and wider ones take more time.

        Assumed: attention in a wider type slows down like matrix products, and a type without a rate is as fast as the
        preset's.
        """
        slower = self.computing_at(dict(self.wide_rates).get(dtype, 1.0))
        return replace(slower, bytes_per_value=_TYPE_BYTES[dtype])

    def computing_at(self, speed: float) -> Self:
        """The same device with ``speed`` times its arithmetic rates; memory and links do not change."""
        return replace(self, peak_flops=self.peak_flops * speed, attention=self.attention.times(speed))


_TYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}

# ``gemm_efficiency`` and ``exposed`` of NVIDIA's GPUs are fitted by studies' fit_prices.py to whole steps. (Matrix
# products of a block reach 79% of the best shape on H100 and 93% on A100. The rates of the best shape are quoted from
# the table of maximum achievable matmul FLOPS in S. Bekman, "ML Engineering": 794 and 268 TFLOP/s; 1,745 on B200 and
# 668 on MI300X.)

# Assumed: element-wise kernels reach 85% of the memory bandwidth.
_MEMORY_EFFICIENCY = 0.85

# FlashAttention-2's forward: rate and drain fitted by studies' fit_kernels.py to launches of real mixes of documents
# on H100 (hao-ai-lab/DistCA; 64 query and 4 key/value heads x 128 over tp 1 to 8, queries cut 1 to 8 ways); its half
# length derived: a query pays for the other half of the tile of 128 x 128 on the diagonal, and for its share of a last
# tile that is half empty, 64 pairs each. Its backward: that with which both together run at the 337 to 346 TFLOP/s that
# DistCA's whole steps on H200 show; half length from MagiAttention's bars (SandAI-org/MagiAttention, variable-length
# causal, 64 query and 8 key/value heads x 128, 1K to 32K tokens). Backwards of FlashAttention-3 and cuDNN: fitted to
# these bars by the same script. Their forwards: derived, half lengths from the speeds by length in arXiv 2407.08608,
# rates between these and the bars. Assumed: kernels with one block on a processor, not two, drain in half the time.
HOPPER_KERNELS = {
    "fa2": AttentionKernel(372e12, 330e12, 256.0, 850.0, drain_tiles=100.0),
    "fa3": AttentionKernel(620e12, 560e12, 320.0, 1200.0, drain_tiles=50.0),
    "cudnn": AttentionKernel(540e12, 450e12, 320.0, 1050.0, drain_tiles=50.0),
}
# FlashAttention-2 on B200, which torch runs unless told otherwise, is hardly faster than on H100. Derived, with H100's
# half lengths and drain: forward from 362 and 331 TFLOP/s at 8,192 and 16,384 tokens, head_dim 128 (tritonbench pull
# request 171), backward from 334 at 16,384, head_dim 64 (flash-attention issue 1589).
# cuDNN and FlashAttention-4: quoted, rounded, between MagiAttention's bars on B200 of one document and of many (causal,
# 8K to 32K tokens) and, of FlashAttention-4, 1,418 and 1,209 TFLOP/s at 8,192 tokens (flash-attention pull request
# 2280).
BLACKWELL_KERNELS = {
    "fa2": replace(HOPPER_KERNELS["fa2"], forward_flops=385e12, backward_flops=345e12),
    "cudnn": AttentionKernel(1340e12, 780e12, 800.0, 1700.0, drain_tiles=50.0),
    "fa4": AttentionKernel(1450e12, 1300e12, 600.0, 1300.0, drain_tiles=50.0),
}

_H100 = Hardware(
    peak_flops=989e12,  # quoted: NVIDIA H100 SXM data sheet, bf16 dense
    gemm_efficiency=0.635,
    attention=HOPPER_KERNELS["fa2"],
    memory_bandwidth=_MEMORY_EFFICIENCY * 3.35e12,  # quoted: H100 SXM data sheet
    node_size=8,
    # Fitted to nccl-tests of H100 with NVLink 4 and a 400 Gb/s adapter for each GPU, 1 MB to 4 GB: all-gather,
    # reduce-scatter and all-to-all in a node of 4 and 8, over 10 nodes with 1, 2, 4 and 8 GPUs of each, and between 2
    # nodes (github.com/xxrjun/nccl-tests-cluster, example-cluster01; github.com/waynehacking8/nccl-collectives-bench;
    # github.com/NVIDIA/nccl issue 1357). Errors by size are in tests/workload/published_measurements.md: within 15%
    # except those that docs/presets.md names.
    # Quoted by NCCL's maintainers: 370 GB/s over NVLink 4 (nccl-tests issue 212), 48 to 49 over an adapter (issue 267).
    node_bandwidth=345e9,
    node_latency=15e-6,
    network_bandwidth=47e9,
    network_latency=60e-6,
    step_latency=4e-6,
    bytes_per_value=2,
    memory_bytes=80e9,  # quoted: H100 SXM data sheet, 80 GB
    # Quoted: the same, 67 TFLOP/s in float32 without, and in float64 with tensor cores. TF32 stays off, as in torch.
    wide_rates=(("float32", 67 / 989), ("float64", 67 / 989)),
    exposed=0.4,
)

HARDWARE: dict[str, Hardware] = {
    "a100": replace(
        _H100,
        peak_flops=312e12,  # quoted: NVIDIA A100 80GB SXM data sheet, bf16 dense
        gemm_efficiency=0.8,
        # Assumed: FlashAttention-2 between the 50% and 73% of peak that it reports on A100 (arXiv 2307.08691), with
        # H100's half lengths.
        attention=replace(_H100.attention, forward_flops=0.65 * 312e12, backward_flops=0.57 * 312e12),
        memory_bandwidth=_MEMORY_EFFICIENCY * 2.039e12,  # quoted: the same
        # Derived: H100's shares of links of 300 GB/s and 200 Gb/s. Quoted: 230 GB/s over NVLink 3 (nccl-tests issue
        # 149), 24 over an adapter (119), 192 over a node's eight (nccl issue 812). Assumed: H100's latencies.
        node_bandwidth=_H100.node_bandwidth * 300 / 450,
        network_bandwidth=_H100.network_bandwidth * 200 / 400,
        memory_bytes=80e9,  # quoted: the data sheet
        wide_rates=(("float32", 19.5 / 312), ("float64", 19.5 / 312)),  # quoted: the same, as H100's
    ),
    "h100": _H100,
    # The same chip with faster and more memory; quoted: NVIDIA H200 data sheet.
    "h200": replace(_H100, memory_bandwidth=_MEMORY_EFFICIENCY * 4.8e12, memory_bytes=141e9),
    "b200": replace(
        _H100,
        peak_flops=2250e12,  # quoted: NVIDIA B200 SXM data sheet, bf16 dense
        gemm_efficiency=0.56,
        attention=BLACKWELL_KERNELS["fa2"],
        memory_bandwidth=_MEMORY_EFFICIENCY * 8.0e12,  # quoted: data sheet
        node_bandwidth=680e9,  # quoted: 673 to 682 GB/s of an all-reduce over rings (ML Engineering, network)
        memory_bytes=180e9,  # quoted: data sheet
        # Quoted: data sheet, 80 and 40 TFLOP/s. The adapter is assumed to be H100's, 400 Gb/s for each GPU.
        wide_rates=(("float32", 80 / 2250), ("float64", 40 / 2250)),
    ),
    "mi300x": replace(
        _H100,
        peak_flops=1307e12,  # quoted: AMD Instinct MI300X data sheet, bf16 dense
        gemm_efficiency=0.79 * 668 / 1307,  # assumed: H100's share of the best shape
        # Derived: FlashAttention-2's backward is 1% to 4% faster than on H100 (Zyphra, "Frontier training kernels for
        # transformers and SSMs on AMD Instinct MI300X"), and so, assumed, is the forward.
        attention=HOPPER_KERNELS["fa2"].times(1.02),
        memory_bandwidth=_MEMORY_EFFICIENCY * 5.3e12,  # quoted: data sheet
        node_bandwidth=313e9,  # quoted: 4 GiB all-reduce of 8 GPUs (ML Engineering, network)
        peer_bandwidth=47.7e9,  # quoted: the same of 2 GPUs
        memory_bytes=192e9,  # quoted: data sheet
        wide_rates=(("float32", 163.4 / 1307), ("float64", 163.4 / 1307)),  # quoted: data sheet, matrix cores
    ),
    # Measured on one core of an AMD EPYC (family 26) with torch 2.13.0, one thread, float32: matrix products,
    # norms, rotary embedding and SwiGLU of a block of hidden size 128, torch's flash attention over 4 heads x 32
    # for 16 to 8,192 tokens (attention and linear part of a document together within 10%), and gloo between
    # two processes for 1 MB and more.
    "cpu": Hardware(
        peak_flops=115e9,
        gemm_efficiency=0.93,
        attention=AttentionKernel(81e9, 79e9, 170.0, 170.0),
        memory_bandwidth=5e9,
        node_size=64,  # assumed: all processes on one machine
        node_bandwidth=1.7e9,
        node_latency=100e-6,
        network_bandwidth=1.7e9,
        network_latency=100e-6,
        step_latency=0.0,
        bytes_per_value=4,
        memory_bytes=4e9,  # assumed
        wide_rates=(("float64", 1 / 2),),  # derived: half as many values in a vector
        device_type="cpu",
    ),
}

# Quoted: data sheets of HGX B300 and of GB200 and GB300 NVL72, whose 72 GPUs share the fast links.
_B200 = HARDWARE["b200"]
HARDWARE |= {
    "b300": replace(_B200, memory_bytes=270e9),
    "gb200": replace(_B200, peak_flops=2500e12, gemm_efficiency=0.61, memory_bytes=186e9, node_size=72),
    "gb300": replace(_B200, peak_flops=2500e12, gemm_efficiency=0.85, memory_bytes=279e9, node_size=72),
}
# Presets use FlashAttention-2, as torch does by default; those named after other kernels use these.
HARDWARE |= {
    f"{name}-{kernels}": replace(HARDWARE[name], attention=kernel)
    for name, of_device in {"h100": HOPPER_KERNELS, "h200": HOPPER_KERNELS, "b200": BLACKWELL_KERNELS}.items()
    for kernels, kernel in of_device.items()
    if kernels != "fa2"
}


def hardware_preset(name: str) -> Hardware:
    """The preset ``name``, in either case. Raises ``UserError`` for an unknown one."""
    try:
        return HARDWARE[name.lower()]
    except KeyError:
        raise UserError(f"unknown hardware {name!r}; {choose_from(name, HARDWARE)}") from None
