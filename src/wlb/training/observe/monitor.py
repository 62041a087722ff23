"""What each rank measures of its steps, which all ranks exchange when the backward passes are done."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule, tensorboard_trace_handler

from wlb.job.config import MetricsConfig
from wlb.runtime.clock import ComputeClock
from wlb.runtime.collectives import gathered_rows

_STEPS_3_AND_4 = schedule(wait=1, warmup=1, active=2, repeat=1)  # of a run; starting to trace takes time, in step 2


class Monitor:
    """One rank's; every rank calls every method. ``clock`` is for the pipeline to start and stop.

    ``trace`` is the profiler around the steps, to be told when one ends: with ``metrics.profile`` it leaves a Chrome
    trace of steps 3 and 4 of a run in ``metrics.dir``/trace, where ``record_function`` names what a step does.
    """

    def __init__(self, metrics: MetricsConfig, device: torch.device) -> None:
        self._device = device
        self.clock = ComputeClock(device)
        self.trace = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])],
            schedule=_STEPS_3_AND_4 if metrics.profile else lambda step: ProfilerAction.NONE,
            on_trace_ready=tensorboard_trace_handler(
                str(metrics.dir / "trace"), f"rank-{dist.get_rank()}", use_gzip=True
            ),
        )

    def exchange(self, loss_share: Tensor) -> tuple[float, NDArray[np.float64]]:
        """After the backward passes of a step: its loss, and the seconds that each rank computed, shape (ranks,).

        ``loss_share`` is a scalar; the loss is the sum of all ranks' shares.
        """
        rows = gathered_rows([float(loss_share), self.clock.end_step()], torch.float64, self._device)
        return float(rows[:, 0].sum()), rows[:, 1].numpy()
