"""The other questions that the planner benchmark asks: against the optimum, planning time, and a job's targets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parts.measurement import CpuTimer
from parts.planner.curves import Corpus, Point
from parts.streams import batched, first_steps
from wlb.packing.arrange import arrange
from wlb.packing.exact import solve
from wlb.packing.plan import StepPlan
from wlb.simulate import SimulatedJob, simulate_steps
from wlb.simulate.compare import packer_for

Row = dict[str, Any]

_FACTOR = 1.5


def placement(lengths: NDArray[np.int64], job: SimulatedJob, steps: int, time_limit: float) -> Row:
    """Steps of ``makespan`` placed again by the integer program, same documents and L_max, ``time_limit`` s each."""
    plans = _packer(job).plan(lengths.tolist())[:steps]
    over_best, over_bound = [], []
    for plan in plans:
        placed = [(segment.length, number) for number, m in enumerate(plan.micro_batches) for segment in m.segments]
        step_lengths = [length for length, _ in placed]
        largest = max(micro_batch.workload for micro_batch in plan.micro_batches)
        best = solve(
            step_lengths,
            job.packing_prices.document_seconds(step_lengths).tolist(),
            job.packing.micro_batches,
            int(_FACTOR * job.context_window),
            start=[number for _, number in placed],
            time_limit=time_limit,
        )
        over_best.append(largest / best.largest_seconds - 1)
        over_bound.append(largest / best.bound_seconds - 1)
    return {
        "steps": len(plans),
        "over_best_mean": float(np.mean(over_best)),
        "over_best_largest": max(over_best),
        "over_bound_mean": float(np.mean(over_bound)),
        "within_0.01%_of_bound": sum(excess <= 1e-4 for excess in over_bound),
    }


def fixed_solver(corpus: Corpus, time_limit: float) -> list[Point]:
    """The integer program for fixed-length packing, and ``makespan`` on the same documents."""
    return [corpus.point("fixed_solver", solver_seconds=time_limit), corpus.point("makespan", _FACTOR)]


def planning_times(lengths: NDArray[np.int64], jobs: Sequence[SimulatedJob]) -> list[Row]:
    """Median CPU time of planning one step, beside the simulated seconds of the step that hides it."""
    rows: list[Row] = []
    for job in jobs:
        steps = max(5, 256 // job.packing.micro_batches)
        stream = first_steps(lengths, (steps + 1) * job.global_batch * job.context_window)
        packer = _packer(job)
        timed, marks = CpuTimer(), [0.0]
        plans: list[StepPlan] = []
        for documents in batched(stream, 64):
            planned = timed(packer.plan, documents)
            if planned:
                marks.append(timed.seconds)
                plans += planned
        milliseconds = 1e3 * median(after - before for before, after in pairwise(marks))
        step_seconds = float(simulate_steps([arrange(plan, job.layout.dp) for plan in plans], job).seconds.mean())
        rows.append(
            {
                "micro_batches": job.packing.micro_batches,
                "documents_per_step": len(stream) / (steps + 1),
                "planning_ms": milliseconds,
                "step_seconds": step_seconds,
                "planning_share": milliseconds / 1e3 / step_seconds,
            }
        )
    return rows


def _packer(job: SimulatedJob) -> Any:
    return packer_for("makespan", job, max_length_factor=_FACTOR)


def targets(points: Sequence[Point]) -> list[Row]:
    """The least imbalance that ``points`` of ``makespan`` reach within some bounds."""
    rows = []
    for imbalance, delay, factor in ((1.005, 0.20, 2.0), (1.01, 0.35, 1.5), (1.18, 0.0, 2.0)):
        within = [p for p in points if p.delay <= delay and p.length_factor <= factor and p.packer == "makespan"]
        best = min(within, key=lambda p: p.imbalance)
        rows.append(
            {
                "token_delay_at_most": delay,
                "length_factor_at_most": factor,
                "imbalance_target": imbalance,
                "imbalance": best.imbalance,
                "token_delay": best.delay,
                "longest_delay": best.longest_delay,
                "reached": best.imbalance <= imbalance and best.longest_delay <= 8,
            }
        )
    return rows
