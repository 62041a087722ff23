"""What each rank measures of its steps, and the exchange of these measurements.

When the backward passes are done, all ranks exchange a row of numbers: the loss, what was measured, and what the
workload model predicts for the same micro-batches. What rank 0 makes of the rows is in ``reporter``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule, tensorboard_trace_handler

from wlb.job.config import MetricsConfig
from wlb.job.job import Job
from wlb.runtime.collectives import gathered_rows
from wlb.schedules.layout import split_layers
from wlb.sharding.plan import ShardPlan, owners
from wlb.training.data.loader import LoadedStep
from wlb.training.environment import hardware_name
from wlb.training.observe.compute_clock import EventClock, Seconds, ThreadClock
from wlb.training.observe.imbalance import RankSteps
from wlb.training.parallel.mesh import JobMesh
from wlb.workload import Costs, make_workload

_STEPS_3_AND_4 = schedule(wait=1, warmup=1, active=2, repeat=1)  # of a run; starting to trace takes time, in step 2


class Monitor:
    """One rank's; every rank calls every method. ``clock`` is for the pipeline to start and stop.

    ``trace`` is the profiler around the steps, to be told when one ends: with ``metrics.profile`` it leaves a Chrome
    trace of steps 3 and 4 of a run in ``metrics.dir``/trace, where ``record_function`` names what a step does.
    """

    def __init__(self, metrics: MetricsConfig, job: Job, mesh: JobMesh, device: torch.device) -> None:
        shape, layout = job.shape, job.layout
        self._mesh = mesh
        self._device = device
        self._levels_steps = job.levels_steps
        self._layers = split_layers(shape, layout.stages)[mesh.rank("pp") :: layout.pp]
        self._costs = make_workload(shape, hardware_name(device), layout.tp)
        self.clock = EventClock() if device.type == "cuda" else ThreadClock()
        self.trace = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])],
            schedule=_STEPS_3_AND_4 if metrics.profile else lambda step: ProfilerAction.NONE,
            on_trace_ready=tensorboard_trace_handler(
                str(metrics.dir / "trace"), f"rank-{dist.get_rank()}", use_gzip=True
            ),
        )

    def exchange(self, loaded: LoadedStep, loss_share: Tensor) -> RankSteps:
        """After the backward passes of a step: the rows of all ranks.

        ``loss_share`` is a scalar; the loss of the step is the sum of all ranks' shares.
        """
        predicted = [predicted_seconds(batch.shard_plan, self._costs, self._layers) for batch in loaded.batches]
        own = np.array([of_ranks[batch.rank] for of_ranks, batch in zip(predicted, loaded.batches, strict=True)])
        slowest = own if self._levels_steps else np.max(predicted, axis=1)
        compute = self.clock.end_step()
        in_tp = self._slowest(compute, "tp")
        in_cp = in_tp if self._levels_steps else self._slowest(in_tp, "cp")
        row = [float(loss_share), *(float(seconds.sum()) for seconds in (own, slowest, compute, in_tp, in_cp))]
        return RankSteps(*gathered_rows(row, torch.float64, self._device).T.numpy())

    def _slowest(self, seconds: Seconds, dimension: str) -> Seconds:
        """Of each micro-batch, the seconds of the slowest rank in this one's group."""
        if self._mesh.size(dimension) == 1:
            return seconds
        slowest = torch.tensor(seconds, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._mesh.group(dimension))
        return slowest.cpu().numpy()


def predicted_seconds(plan: ShardPlan, costs: Costs, layers: Sequence[range]) -> NDArray[np.float64]:
    """Forward and backward of a micro-batch on each context-parallel rank that holds ``layers``; shape (cp,).

    Compute only, as in ``wlb.simulate.step.Steps.computing``: attention over the rank's pieces and everything else on
    its tokens, on its part of the layers. With the last layer come the output head and the loss.
    """
    rank, tokens = owners(plan.pieces), plan.tokens_per_rank
    _, start, stop = np.concatenate(plan.pieces).T
    last_keys = np.zeros(plan.cp_size, np.int64)
    np.maximum.at(last_keys, rank, stop)
    attention = np.bincount(rank, costs.piece_seconds(start, stop), plan.cp_size) + costs.drain_seconds(last_keys)
    blocks = (attention + costs.blocks_seconds(tokens)) * sum(map(len, layers)) / costs.shape.layers
    return blocks + costs.head_seconds(tokens) * any(chunk.stop == costs.shape.layers for chunk in layers)
