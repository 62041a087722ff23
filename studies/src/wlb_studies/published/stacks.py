"""Prices of software that trains differently from ours: other kernels, types and collectives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.errors import UserError
from wlb.job.prices import Software
from wlb.simulate.costs import JobCosts
from wlb.workload import HARDWARE, Costs, Hardware, ModelShape
from wlb.workload.base import Direction, Phase, Seconds
from wlb.workload.costs import Rates
from wlb.workload.flops import LINEAR_FACTORS, elementwise_values_per_token, gemm_flops_per_token
from wlb.workload.hardware import BLACKWELL_KERNELS, HOPPER_KERNELS, AttentionKernel
from wlb.workload.weights import expert_weights

# Rates of matrix products in narrow types over those in bf16; fitted by fit_prices.py. (Tensor cores are twice as fast
# in FP8; scaling and casting take the rest.)
HOPPER_RATES = {"fp8": 1.76, "fp8-rowwise": 0.85}
BLACKWELL_RATES = {"fp8": 2.0, "nvfp4": 3.2}
# By the first letter of a preset. Triton's is FlashAttention before its second version: fitted to llm-foundry's steps,
# both directions alike; its half length on A100 is assumed to be that on H100.
KERNELS = {
    "a": {"fa2": HARDWARE["a100"].attention, "triton": AttentionKernel(104e12, 104e12, 850.0, 850.0)},
    "h": {**HOPPER_KERNELS, "triton": AttentionKernel(186e12, 186e12, 850.0, 850.0)},
    **dict.fromkeys("bg", BLACKWELL_KERNELS),
}
# Memory traffic of separate element-wise kernels over fused ones, fitted to the gain of torch.compile in fms-fsdp, 1.11
# to 1.28. (By counting, RMSNorm and rotary embedding in float32 and SwiGLU move 3.5 times as many values.)
_UNFUSED_PASSES = 7.0


def attention_kernel(preset: str, name: str) -> AttentionKernel:
    """The attention kernels ``name`` on ``preset``: "fa2", "fa3", "fa4", "cudnn" or "triton".

    Raises ``UserError`` that lists the kernels with a price if the device has none of that name.
    """
    kernels = KERNELS.get(preset[0], {})
    if name not in kernels:
        known = f"choose one of {', '.join(kernels)}" if kernels else "only its own kernels have one"
        raise UserError(f"attention kernels {name!r} have no price on this device; {known}")
    return kernels[name]


def narrow_rate(preset: str, dtype: str) -> float:
    """The rate of matrix products of blocks in ``dtype`` on ``preset``, over that in bf16.

    Attention, the output head and activations stay in bf16. Raises ``UserError`` for a type without a rate.
    """
    rates = {"h": HOPPER_RATES, "b": BLACKWELL_RATES, "g": BLACKWELL_RATES}.get(preset[0], {}) | {"bf16": 1.0}
    if dtype not in rates:
        raise UserError(f"no rates are known for {dtype!r} on this device; choose one of {', '.join(rates)}")
    return rates[dtype]


@dataclass(frozen=True)
class StackSoftware(Software):
    """A training stack whose prices are ``StackCosts``.

    A stack that is not ``fused`` runs every element-wise operation as its own kernel. ``block_rate`` is the rate of
    matrix products of blocks in a narrow type, over that in the preset's. ``micro_batch_seconds`` is host time for a
    forward and backward, however few tokens; the GPU waits for it.

    If only ``adapters`` are trained (LoRA), a backward computes no gradients of weights. Their own products, some
    percent of the model's, are not counted.

    With ``gathers_context`` every context-parallel rank gathers all keys and values of the micro-batch before attention
    and reduces all their gradients after it, without overlap (``PerDocumentCPAttention`` of hao-ai-lab/DistCA, whose
    collectives run in the kernels' stream).
    """

    expert_imbalance: float = 1.0  # prices were fitted to these rows without any
    fused: bool = True
    block_rate: float = 1.0
    micro_batch_seconds: float = 0.0
    adapters: bool = False
    gathers_context: bool = False

    def costs(self, shape: ModelShape, hardware: Hardware, tp: int, **settings: Any) -> StackCosts:
        return StackCosts(**vars(super().costs(shape, hardware, tp, **settings)), software=self)


@dataclass(frozen=True)
class StackCosts(Costs):
    """``Costs`` of a ``StackSoftware``."""

    software: StackSoftware = StackSoftware()

    def phase_rates(self, phase: Direction) -> Rates:
        ours, shape, hardware, software = super().phase_rates(phase), self.shape, self.hardware, self.software
        values = elementwise_values_per_token(shape, phase)
        more = 0.0 if software.fused else _UNFUSED_PASSES - 1
        elements = more * values * hardware.bytes_per_value / hardware.memory_bandwidth / self.tp
        gemm_rate = hardware.peak_flops * hardware.gemm_efficiency * self.tp
        flops = gemm_flops_per_token(shape) - 2.0 * shape.vocab_size * shape.hidden  # grouping is never narrow
        narrow = LINEAR_FACTORS[phase] * (1 - 1 / software.block_rate) / gemm_rate
        saved = narrow * flops
        rates = ours._replace(
            block_token=ours.block_token + elements - saved,
            block_products=ours.block_products - saved,
            expert_token=ours.expert_token - narrow * 2.0 * expert_weights(shape, active=True),
        )
        return rates if phase == "forward" or not software.adapters else _without_weight_gradients(rates)

    def _adding_seconds(self, weights: float, phase: Direction) -> float:
        return 0.0 if self.software.adapters else super()._adding_seconds(weights, phase)

    @property
    def gathers_context(self) -> bool:
        return self.software.gathers_context

    def blocks_seconds(self, tokens: ArrayLike, phase: Phase = "both", routed: ArrayLike | None = None) -> Seconds:
        """Includes host time, a third of it in the forward."""
        seconds = super().blocks_seconds(tokens, phase, routed)
        if phase == "both":  # the sum of both phases
            return seconds
        own = LINEAR_FACTORS[phase] * (self.software.micro_batch_seconds / LINEAR_FACTORS["both"])
        return seconds + np.where(np.asarray(tokens) > 0, own, 0.0)


def _without_weight_gradients(backward: Rates) -> Rates:
    """Half of the products of a backward."""
    blocks, head = backward.block_products / 2, backward.head_products / 2
    return backward._replace(
        block_token=backward.block_token - blocks,
        block_products=blocks,
        head_token=backward.head_token - head,
        head_products=head,
        experts=backward.experts / 2,
        expert_token=backward.expert_token / 2,
    )


class AdapterCosts(JobCosts):
    """Costs of a step that trains adapters alone: their gradients and optimizer state are too small to count."""

    @cached_property
    def block_reduction(self) -> float:
        return 0.0

    @cached_property
    def root_reduction(self) -> NDArray[np.float64]:
        return np.zeros(self.layout.stages)

    @cached_property
    def optimizer(self) -> NDArray[np.float64]:
        return np.zeros(self.layout.pp)
