"""``wlb train --trace``: a torch.profiler trace of a few steps of every rank, with names for what a step does.

The files are Chrome traces, one a rank, for Perfetto (https://ui.perfetto.dev) or chrome://tracing. The names come from
``profiler_regions.region`` where the work is done.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from wlb.training.runtime.console import say

WARMUP_STEPS = 2  # of which the second is traced and thrown away, as starting to trace takes time
TRACED_STEPS = 2


class StepTrace:
    """Traces steps 3 and 4 of a run into ``directory``/rank-N.json.gz."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._path = directory / f"rank-{dist.get_rank()}.json.gz"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=WARMUP_STEPS - 1, warmup=1, active=TRACED_STEPS, repeat=1),
            on_trace_ready=self._write,
        )

    def start(self) -> None:
        self._profile.start()

    def end_step(self) -> None:
        self._profile.step()

    def stop(self) -> None:
        """End tracing; a run that was too short leaves what was traced, or nothing."""
        self._profile.stop()

    def _write(self, finished: profile) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            say(f"wlb: warning: trace {self._path} could not be written: {error}")
            return
        if dist.get_rank() == 0:
            say(f"traces of {TRACED_STEPS} steps are in {self._path.parent}")
