"""Kernels are counted for the micro-batch in whose region they were launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch.autograd import DeviceType

from wlb.training.observe.kernel_clock import KernelClock, kernel_seconds


@dataclass
class FakeInterval:
    start: float
    end: float


@dataclass
class FakeEvent:
    name: str
    time_range: FakeInterval
    id: int = 0
    device_type: DeviceType = DeviceType.CPU
    is_user_annotation: bool = False


def on_cpu(name: str, start: float, end: float, number: int = 0) -> FakeEvent:
    return FakeEvent(name, FakeInterval(start, end), number)


def kernel(name: str, start: float, end: float, launch: int, annotation: bool = False) -> FakeEvent:
    return FakeEvent(name, FakeInterval(start, end), launch, DeviceType.CUDA, annotation)


def test_kernels_belong_to_the_region_of_their_launch():
    events: list[Any] = [
        on_cpu("forward micro-batch 0", 0, 10, 900),
        on_cpu("cudaLaunchKernel", 1, 2, 1),
        kernel("gemm", 5, 25, 1),  # runs on after its region has closed
        on_cpu("cuLaunchKernelEx", 3, 4, 2),
        kernel("ncclDevKernel_AllGather", 5, 1000, 2),
        on_cpu("forward micro-batch 1", 12, 20, 901),
        on_cpu("cudaLaunchKernelExC_v11060", 13, 14, 3),
        kernel("flash_fwd", 30, 60, 3),
        kernel("forward micro-batch 1", 30, 60, 901, annotation=True),
        on_cpu("cudaMemcpyAsync", 15, 16, 4),
        kernel("Memcpy DtoD (Device -> Device)", 60, 70, 4),
        on_cpu("backward micro-batch 0", 40, 80, 902),
        on_cpu("cudaLaunchKernel", 50, 51, 5),  # on the thread of the backward
        kernel("flash_bwd", 90, 190, 5),
        on_cpu("cudaLaunchKernel", 85, 86, 6),  # the optimizer, in no region
        kernel("multi_tensor_apply", 200, 300, 6),
        on_cpu("aten::mm", 1, 2, 5),  # numbered otherwise than launches
    ]
    assert kernel_seconds(events, 2).tolist() == pytest.approx([120e-6, 30e-6])
    assert kernel_seconds(reversed(events), 2).tolist() == pytest.approx([120e-6, 30e-6])


def test_a_step_that_is_not_sampled_is_not_measured():
    for every in (0, 50):
        clock = KernelClock(every)
        for _ in range(3):
            clock.begin_step(2)
            with clock.measuring("forward", 0):
                pass
            assert clock.end_step() is None
