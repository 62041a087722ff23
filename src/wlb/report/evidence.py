"""The data of a report on document lengths: every preset simulated on the same documents.

The presets are judged as by every other command (``wlb.simulate.verdict``), and the packing methods by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.filling import documents_for
from wlb.job.memory.fit import fits
from wlb.job.planner import StepPlanner
from wlb.report.gain import Gain, gain
from wlb.sharding import STRATEGIES, ShardPlan, make_shard_plan
from wlb.simulate import SimulatedJob, SimulationResult
from wlb.simulate.compare import MethodResult, compare_packer, packer_for
from wlb.simulate.timeline import Timeline, timeline
from wlb.simulate.verdict import BASELINE, BEST, Verdict, judge_presets

METHODS = ("sequential", "fixed_greedy", "fixed_greedy:8", "variable_length:paper")
RECOMMENDED = "makespan"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Evidence:
    """Everything that the report on ``lengths`` shows; all of it is simulated."""

    lengths: NDArray[np.int64]
    verdict: Verdict
    methods: list[MethodResult]

    @property
    def systems(self) -> Mapping[str, SimulationResult]:
        return self.verdict.systems

    @property
    def job(self) -> SimulatedJob:
        return self.systems[BEST].job

    @property
    def winner(self) -> str:
        """The preset that is recommended."""
        return self.verdict.preset

    @cached_property
    def fits(self) -> bool:
        """Whether the memory model finds room for a window on every GPU."""
        return fits(self.job)

    @cached_property
    def gains(self) -> dict[str, Gain]:
        """Of every system over the baseline, at equal work."""
        return self._gains(lambda system: system.step_work_seconds)

    @cached_property
    def gains_in_tokens(self) -> dict[str, Gain]:
        """The same in tokens/s, which also count what is cut away, and what still waits, as a gain."""
        return self._gains(lambda system: system.step_tokens)

    @cached_property
    def usual_steps(self) -> dict[str, Timeline]:
        """Of the baseline, of ``best`` and of the winner, the step with the most usual seconds for its work."""
        names = {BASELINE, BEST, self.winner}
        return {name: usual_step(self.verdict, name, self.lengths) for name in names}

    @cached_property
    def shards(self) -> list[ShardPlan]:
        """The heaviest micro-batch of ``best``'s usual step by every strategy; none without context parallelism."""
        job = self.job
        if job.layout.cp == 1:
            return []
        heaviest = max(self.usual_steps[BEST].plan.micro_batches, key=lambda micro_batch: micro_batch.workload)
        return [
            make_shard_plan(heaviest.lengths, job.layout.cp, name, workload=job.sharding_workload)
            for name in STRATEGIES
        ]

    def _gains(self, done: Callable[[SimulationResult], NDArray[Any]]) -> dict[str, Gain]:
        before = self.systems[BASELINE]
        return {
            name: gain(done(before), before.step_seconds, done(after), after.step_seconds)
            for name, after in self.systems.items()
            if name != BASELINE
        }


def gather_evidence(
    lengths: NDArray[np.int64], job: SimulatedJob, steps: int | None, on_progress: Progress = lambda what: None
) -> Evidence:
    """Simulate ``job``, which is ``best``, under every preset for ``steps`` steps, and pack the documents by methods.

    Without ``steps`` for as many as ``judge`` does. Raises ``UserError`` where the documents do not fill one step.
    """
    *_, found = judge_presets(
        job, lengths, steps=steps, on_progress=lambda name, done: on_progress(f"simulating {name}")
    )
    documents, _ = documents_for(lengths, job.packing.micro_batches, job.context_window, steps=found.steps)
    best = found.systems[BEST].job
    methods = []
    for method in (*METHODS, RECOMMENDED):
        on_progress(f"packing {method}")
        packer = packer_for(method, best, max_length_factor=float(best.packing.length_factor))
        methods.append(compare_packer(method, packer, documents, best))
    return Evidence(lengths, found, methods)


def usual_step(verdict: Verdict, system: str, lengths: NDArray[np.int64]) -> Timeline:
    """The step of ``system`` with the most usual seconds for its work, planned again on documents of ``lengths``."""
    result = verdict.systems[system]
    usual = int(np.abs(result.step_seconds / result.step_work_seconds - 1 / result.work_rate).argmin())
    return timeline(next(StepPlanner(result.job, lengths).plans(verdict.warm_up + usual)), result.job)
