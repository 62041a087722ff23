"""What each rank measures in a step; ranks exchange it after the backward passes."""

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

_STEPS_3_AND_4 = schedule(wait=1, warmup=1, active=2, repeat=1)  # of a run; starting the profiler slows step 2


class Monitor:
    """The monitor of one rank; every rank calls every method. The pipeline starts and stops ``clock``.

    ``trace`` is the profiler around the steps; call its ``step`` after each. With ``metrics.profile`` it writes a
    Chrome trace of steps 3 and 4 of a run to ``metrics.dir``/trace, with the regions named by ``record_function``.
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
        """After the backward passes of a step, return its loss and the seconds that each rank computed, shape (ranks,).

        ``loss_share`` is a scalar; the loss is the sum of all ranks' shares.
        """
        rows = gathered_rows([float(loss_share), self.clock.end_step()], torch.float64, self._device)
        return float(rows[:, 0].sum()), rows[:, 1].numpy()
