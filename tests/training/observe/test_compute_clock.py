"""The clock counts computing and waiting for a core, not waiting for other ranks; kernels where they were launched."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from tests.training.distributed import run_ranks
from tests.training.processes import stands_still, wait_until
from wlb.training.observe.compute_clock import KernelClock, ThreadClock, kernel_seconds, thread_seconds

LINUX = pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="needs Linux's schedstat")


def compute(seconds: float) -> None:
    """Run matrix products, forward and backward, until this thread has spent ``seconds`` on them."""
    x = torch.randn(128, 128, requires_grad=True)
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        (x @ x).sum().backward()


def test_each_micro_batch_gets_what_was_measured_for_it():
    # (ran, waited for a core)
    ticks = iter([(0.0, 0.0), (1.0, 0.0), (10.0, 2.0), (11.0, 3.0), (20.0, 3.0), (23.0, 4.0)])
    clock = ThreadClock(lambda: next(ticks))
    clock.begin_step(3)
    for phase, micro_batch in (("forward", 0), ("forward", 2), ("backward", 0)):
        with clock.measuring(phase, micro_batch):
            pass
    measured = clock.end_step()
    assert (measured.seconds.tolist(), measured.core_wait_seconds) == ([5.0, 0.0, 2.0], 2.0)
    clock.begin_step(2)
    measured = clock.end_step()
    assert (measured.seconds.tolist(), measured.core_wait_seconds) == ([0.0, 0.0], 0.0)


# What a thread computes and what it waits for a core are at most the time that it does not sleep or wait for others,
# however busy the machine is; the clocks may differ by a timer's tick.
TICK = 0.02
ASLEEP = 0.3


def _wait_for_rank_0(turns: int) -> tuple[float, float]:
    """Rank 0 comes to every collective when it has seen rank 1 stand still there; (clock, wall) seconds."""
    pids: list[int | None] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    waiting = pids[1]
    assert waiting is not None
    clock, started = ThreadClock(), time.monotonic()
    clock.begin_step(1)
    for _ in range(turns):
        with clock.measuring("forward", 0):
            compute(0.05)
            if dist.get_rank() == 0:
                wait_until(lambda: stands_still(waiting, ASLEEP))
            dist.all_reduce(torch.ones(1000))
    (measured,) = clock.end_step().seconds
    return float(measured), time.monotonic() - started


@LINUX
def test_waiting_in_a_collective_is_not_computing():
    turns = 3
    _, (measured, wall) = run_ranks(2, _wait_for_rank_0, turns)
    assert turns * 0.05 <= measured < wall - turns * ASLEEP + TICK


_BUSY = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print("running", flush=True)
parent = os.getppid()
while os.getppid() == parent: pass
"""


@LINUX
def test_waiting_for_a_core_counts():
    """With two other processes on its core, a thread that computes for 0.3 s needs and is charged more."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    hogs = [
        subprocess.Popen([sys.executable, "-c", _BUSY, str(core)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        assert [hog.stdout.readline() for hog in hogs if hog.stdout] == ["running\n"] * 2
        os.sched_setaffinity(0, {core})
        started = time.monotonic()
        now = thread_seconds()
        ran_before, waited_before = now()
        compute(0.3)
        ran, waited = now()
        wall = time.monotonic() - started
    finally:
        os.sched_setaffinity(0, cores)
        for hog in hogs:
            hog.kill()
            hog.communicate()
    assert ran - ran_before >= 0.3
    assert waited - waited_before > 0.15
    assert ran - ran_before + waited - waited_before < wall + TICK


def on_cpu(name: str, start: float, end: float, number: int) -> Any:
    interval = SimpleNamespace(start=start, end=end)
    device = {"device_type": DeviceType.CPU, "is_user_annotation": False}
    return SimpleNamespace(name=name, time_range=interval, id=number, **device)


def kernel(name: str, start: float, end: float, launch: int, annotation: bool = False) -> Any:
    device = {"device_type": DeviceType.CUDA, "is_user_annotation": annotation}
    return SimpleNamespace(**vars(on_cpu(name, start, end, launch)) | device)


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
