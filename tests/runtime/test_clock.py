"""The clock counts computing, not waiting for other ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from tests.training.distributed import run_ranks
from tests.training.processes import stands_still, wait_until
from wlb.runtime import clock as clocks
from wlb.runtime.clock import ComputeClock


def test_what_was_measured_in_a_step_adds_up(monkeypatch: pytest.MonkeyPatch):
    ticks = iter([0.0, 1.0, 12.0, 14.0, 23.0, 27.0])
    monkeypatch.setattr(clocks, "thread_seconds", lambda: next(ticks))
    clock = ComputeClock(torch.device("cpu"))
    for phase, micro_batch in (("forward", 0), ("forward", 2), ("backward", 0)):
        with clock.measuring(phase, micro_batch):
            pass
    assert (clock.end_step(), clock.end_step()) == (7.0, 0.0)


class _Event:
    """A CUDA event of a device whose clock moves on by a millisecond with every event recorded."""

    log: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.log.append("record")
        self.at = self.log.count("record")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def elapsed_time(self, end: _Event) -> float:
        return end.at - self.at


class _Stream:
    def record_event(self, event: _Event) -> _Event:
        event.record()
        return event


def test_events_are_read_after_the_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    clock = ComputeClock(torch.device("cuda"))
    for phase, micro_batch in (("forward", 0), ("forward", 1), ("backward", 0)):
        with clock.measuring(phase, micro_batch):
            pass
    assert _Event.log == ["record"] * 6
    assert clock.end_step() == pytest.approx(3e-3)
    assert _Event.log == ["record"] * 6 + ["synchronize"] * 3


TICK = 0.02  # by which clocks may differ
ASLEEP = 0.3


def _wait_for_rank_0() -> tuple[float, float]:
    """Rank 0 comes to the collective when it has seen rank 1 stand still there; (clock, wall) seconds."""
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    clock, started = ComputeClock(torch.device("cpu")), time.monotonic()
    with clock.measuring("forward", 0):
        if dist.get_rank() == 0:
            wait_until(lambda: stands_still(pids[1], ASLEEP))
        dist.all_reduce(torch.ones(1000))
    return clock.end_step(), time.monotonic() - started


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to see a process stand still")
def test_waiting_in_a_collective_is_not_computing():
    _, (measured, wall) = run_ranks(2, _wait_for_rank_0)
    assert measured < wall - ASLEEP + TICK
