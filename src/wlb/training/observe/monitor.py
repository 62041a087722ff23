"""What each rank measures of its steps, and the exchange of these measurements.

The ``Monitor`` of a rank owns the clock that the pipeline starts and stops around every micro-batch. When the backward
passes are done it sets what was measured beside what the workload model predicts for the same micro-batches, and all
ranks exchange a row of numbers; the loss travels in it. What rank 0 makes of the rows is in ``observer``.
"""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.job.config import MetricsConfig
from wlb.job.job import JobSpec
from wlb.schedules.layer_split import split_layers
from wlb.training.data.loader import LoadedStep
from wlb.training.observe.compute_clock import ComputeClock, KernelClock, Seconds, ThreadClock
from wlb.training.observe.imbalance import RankStep, RankSteps, rank_steps
from wlb.training.observe.predicted_load import PredictedLoad
from wlb.training.observe.stragglers import RankName
from wlb.training.observe.trace import StepTrace
from wlb.training.parallel.mesh import JobMesh
from wlb.training.runtime.collectives import gathered, gathered_rows
from wlb.training.runtime.environment import hardware_name


class Monitor:
    """One rank's; every rank calls every method. ``clock`` is for the pipeline to start and stop.

    A context manager around the steps, for the trace.
    """

    def __init__(self, metrics: MetricsConfig, job: JobSpec, mesh: JobMesh, device: torch.device) -> None:
        shape, layout = job.shape, job.layout
        self._mesh = mesh
        self._device = device
        chunks = split_layers(shape, layout.stages)[mesh.rank("pp") :: layout.pp]
        self._load = PredictedLoad(shape, hardware_name(device), chunks, layout.tp)
        self._trace = StepTrace(metrics.dir / "trace", device) if metrics.profile else None
        # A profiler cannot run inside another.
        self.clock: ComputeClock = (
            ThreadClock() if device.type == "cpu" else KernelClock(0 if metrics.profile else metrics.diagnose_every)
        )

    def __enter__(self) -> Monitor:
        if self._trace:
            self._trace.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._trace:
            self._trace.stop()

    def end_step(self) -> None:
        """The step is over, with all that belongs to it."""
        if self._trace:
            self._trace.end_step()

    def exchange(self, loaded: LoadedStep, loss_share: Tensor) -> RankSteps:
        """After the backward passes of a step: the rows of all ranks.

        ``loss_share`` is a scalar; the loss of the step is the sum of all ranks' shares.
        """
        predicted = self._load.seconds([batch.shard_plan for batch in loaded.batches])
        slowest = predicted.max(axis=1)
        row = RankStep(
            loss_share=float(loss_share),
            data_wait_seconds=loaded.wait_seconds,
            predicted_seconds=float(predicted[:, self._mesh.rank("cp")].sum()),
            predicted_cp_seconds=float(slowest.sum()),
            predicted_largest_seconds=float(slowest.max()),
        )
        measured = self.clock.end_step()
        if measured is not None:
            in_tp = self._slowest(measured.seconds, "tp")
            in_cp = self._slowest(in_tp, "cp")
            row = row._replace(
                compute_seconds=float(measured.seconds.sum()),
                tp_seconds=float(in_tp.sum()),
                cp_seconds=float(in_cp.sum()),
                largest_seconds=float(in_cp.max()),
                core_wait_seconds=measured.core_wait_seconds,
            )
        return rank_steps(gathered_rows(row, torch.float64, self._device).numpy())

    def _slowest(self, seconds: Seconds, dimension: str) -> Seconds:
        """Of each micro-batch, the seconds of the slowest rank in this one's group."""
        if self._mesh.size(dimension) == 1:
            return seconds
        slowest = torch.tensor(seconds, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._mesh.group(dimension))
        return slowest.cpu().numpy()


def rank_names(device: torch.device) -> list[RankName]:
    """Where every rank runs, in rank order; called on every rank."""
    return gathered(RankName(socket.gethostname(), os.getpid(), str(device)))
