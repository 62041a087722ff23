"""Clocks that mark moments, also on a GPU, and tell the seconds between two of them afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import sub
from typing import Any, NamedTuple

import torch

_LAUNCH_CYCLES = 600_000  # of a GPU: about 0.3 ms, in which a CPU launches a call


class Clock(NamedTuple):
    """Marks moments, and tells the seconds between a later and an earlier one; profiles have its ``name``."""

    name: str
    mark: Callable[[], Any]
    between: Callable[[Any, Any], float] = sub
    get_ready: Callable[[int], object] = lambda calls: None  # for so many short calls, one after another


WALL_TIME = Clock("wall time", time.perf_counter)
PROCESS_TIME = Clock("process CPU time", time.process_time)


def clock_of(device: torch.device, on_cpu: Clock = WALL_TIME) -> Clock:
    """CUDA events on a GPU, which is kept busy before short calls, or it would wait for the CPU that launches them."""
    if device.type != "cuda":
        return on_cpu
    return Clock("CUDA events", _recorded, _between, lambda calls: torch.cuda._sleep(calls * _LAUNCH_CYCLES))


def _recorded() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
    return event


def _between(end: torch.cuda.Event, begin: torch.cuda.Event) -> float:
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3
