"""What each rank measures of its steps, and the exchange of these measurements.

The ``Monitor`` of a rank owns the clock that the pipeline starts and stops around every micro-batch. When the backward
passes are done it sets what was measured beside what the workload model predicts for the same micro-batches, and all
ranks exchange a row of numbers; the loss travels in it. What rank 0 makes of the rows is in ``reporter``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from wlb.job.config import MetricsConfig
from wlb.job.job import Job
from wlb.runtime.collectives import gathered, gathered_rows
from wlb.schedules.layout import split_layers
from wlb.sharding.plan import ShardPlan, owners
from wlb.training.console import say
from wlb.training.data.loader import LoadedStep
from wlb.training.environment import hardware_name
from wlb.training.observe.compute_clock import ComputeClock, KernelClock, Seconds, ThreadClock
from wlb.training.observe.diagnosis import RankName
from wlb.training.observe.imbalance import RankStep, RankSteps, rank_steps
from wlb.training.parallel.mesh import JobMesh
from wlb.workload import ModelShape, make_workload
from wlb.workload.base import Phase

_WARMUP_STEPS = 2  # of which the second is traced and thrown away, as starting to trace takes time
_TRACED_STEPS = 2


class Monitor:
    """One rank's; every rank calls every method. ``clock`` is for the pipeline to start and stop.

    A context manager around the steps, for the trace.
    """

    def __init__(self, metrics: MetricsConfig, job: Job, mesh: JobMesh, device: torch.device) -> None:
        shape, layout = job.shape, job.layout
        self._mesh = mesh
        self._device = device
        self._levels_steps = job.levels_steps
        chunks = split_layers(shape, layout.stages)[mesh.rank("pp") :: layout.pp]
        self._load = PredictedLoad(shape, hardware_name(device), chunks, layout.tp)
        self._trace = _step_trace(metrics.dir / "trace", device) if metrics.profile else None
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
            self._trace.stop()  # a run that was too short leaves what was traced, or nothing

    def end_step(self) -> None:
        """The step is over, with all that belongs to it."""
        if self._trace:
            self._trace.step()

    def exchange(self, loaded: LoadedStep, loss_share: Tensor) -> RankSteps:
        """After the backward passes of a step: the rows of all ranks.

        ``loss_share`` is a scalar; the loss of the step is the sum of all ranks' shares.
        """
        predicted = [self._load.seconds([batch.shard_plan])[0] for batch in loaded.batches]
        own = np.array([of_ranks[batch.rank] for of_ranks, batch in zip(predicted, loaded.batches, strict=True)])
        slowest = own if self._levels_steps else np.array([of_ranks.max() for of_ranks in predicted])
        row = RankStep(
            loss_share=float(loss_share),
            data_wait_seconds=loaded.wait_seconds,
            predicted_seconds=float(own.sum()),
            predicted_cp_seconds=float(slowest.sum()),
            predicted_largest_seconds=float(slowest.max()),
        )
        measured = self.clock.end_step()
        if measured is not None:
            in_tp = self._slowest(measured.seconds, "tp")
            in_cp = in_tp if self._levels_steps else self._slowest(in_tp, "cp")
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


class PredictedLoad:
    """Prices micro-batches for the ranks that hold ``layers``, the ranges of all chunks of a pipeline rank.

    Compute only, as in ``wlb.simulate.step.Steps.computing``: attention over the rank's pieces and everything else on
    its tokens, on its part of the layers. With the last layer come the output head and the loss. The simulator shards
    micro-batches to find what each rank holds; here the shard plans are there already.
    """

    def __init__(self, shape: ModelShape, hardware: str, layers: Sequence[range], tp: int = 1) -> None:
        self._costs = make_workload(shape, hardware, tp)
        self._share = sum(map(len, layers)) / shape.layers
        self._has_head = any(chunk.stop == shape.layers for chunk in layers)

    def seconds(self, shard_plans: Sequence[ShardPlan]) -> NDArray[np.float64]:
        """Forward and backward of each micro-batch on each context-parallel rank; shape (micro_batches, cp)."""
        both = (self._of_micro_batch(plan, "forward") + self._of_micro_batch(plan, "backward") for plan in shard_plans)
        return np.stack(list(both))

    def _of_micro_batch(self, plan: ShardPlan, direction: Phase) -> NDArray[np.float64]:
        costs, rank, tokens = self._costs, owners(plan.pieces), plan.tokens_per_rank
        _, start, stop = np.concatenate(plan.pieces).T
        last_keys = np.zeros(plan.cp_size, np.int64)
        np.maximum.at(last_keys, rank, stop)
        attention = np.bincount(rank, costs.piece_seconds(start, stop, direction), plan.cp_size)
        blocks = attention + costs.drain_seconds(last_keys, direction) + costs.blocks_seconds(tokens, direction)
        return np.asarray(self._share * blocks + self._has_head * costs.head_seconds(tokens, direction))


def rank_names(device: torch.device) -> list[RankName]:
    """Where every rank runs, in rank order; called on every rank."""
    return gathered(RankName(socket.gethostname(), os.getpid(), str(device)))


def _step_trace(directory: Path, device: torch.device) -> profile:
    """``wlb train --trace``: a Chrome trace of steps 3 and 4 of a run, in ``directory``/rank-N.json.gz.

    For Perfetto (https://ui.perfetto.dev) or chrome://tracing; ``profiler_regions.region`` names what a step does.
    """
    path = directory / f"rank-{dist.get_rank()}.json.gz"

    def write(finished: profile) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            say(f"wlb: warning: trace {path} could not be written: {error}")
            return
        if dist.get_rank() == 0:
            say(f"traces of {_TRACED_STEPS} steps are in {directory}")

    return profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])],
        schedule=schedule(wait=_WARMUP_STEPS - 1, warmup=1, active=_TRACED_STEPS, repeat=1),
        on_trace_ready=write,
    )
