"""The data of a report on document lengths: every preset simulated on the same documents.

The presets are those of every other command (``wlb.simulate.estimate``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wlb.job.memory.fit import fits
from wlb.job.planner import StepPlanner
from wlb.report.timeline import Timeline, timeline
from wlb.sharding import STRATEGIES, ShardPlan, make_shard_plan
from wlb.simulate import SimulationResult
from wlb.simulate.estimate import Estimate
from wlb.simulate.verdict import BALANCED, BASELINE, Verdict

_MIXED = 0.6  # of the tokens of a micro-batch, at most in one document


@dataclass(frozen=True)
class Evidence:
    """Everything that the report on ``lengths`` shows, all simulated."""

    lengths: NDArray[np.int64]
    found: Estimate

    @property
    def verdict(self) -> Verdict:
        return self.found.verdict

    @property
    def systems(self) -> Mapping[str, SimulationResult]:
        return self.verdict.systems

    @property
    def shown(self) -> str:
        """The system to show beside the baseline: the recommended one, or the fastest if none is worth a change."""
        shown = self.verdict.winner if self.verdict.winner != BASELINE else self.verdict.fastest
        return shown if shown != BASELINE else self.sharded

    @property
    def sharded(self) -> str:
        """The system whose job compares sharding strategies: ``balanced`` if it can run."""
        return BALANCED if BALANCED in self.verdict.systems else self.verdict.base

    @cached_property
    def fits(self) -> bool:
        """Whether the memory model finds room for a window on every GPU."""
        return fits(self.systems[BASELINE].job)

    @cached_property
    def usual_steps(self) -> dict[str, Timeline]:
        """The most typical step of the baseline and of the systems ``sharded`` and ``shown``."""
        return {name: usual_step(self.verdict, name, self.lengths) for name in {BASELINE, self.sharded, self.shown}}

    @cached_property
    def shards(self) -> list[ShardPlan]:
        """A heavy micro-batch of a typical step under every strategy; empty if no ranks share one.

        If possible one in which no document has most of the tokens: strategies treat a single document alike. Without
        ``adaptive``, which always does as another one.
        """
        shared = [
            (micro_batch, len(micro_batch.ranks) or step.job.layout.pool_size, step.job)
            for step in (self.usual_steps[self.sharded], self.usual_steps[BASELINE])
            for micro_batch in step.plan.micro_batches
        ]
        shared = [one for one in shared if one[1] > 1]
        if not shared:
            return []
        chosen, ranks, job = max(
            shared, key=lambda one: (max(one[0].lengths) < _MIXED * one[0].tokens, one[0].workload)
        )
        names = [name for name in STRATEGIES if name != "adaptive"]
        return [make_shard_plan(chosen.lengths, ranks, name, workload=job.costs) for name in names]


def usual_step(verdict: Verdict, system: str, lengths: NDArray[np.int64]) -> Timeline:
    """The step of ``system`` whose speed is closest to the mean, planned again on documents of ``lengths``."""
    result = verdict.of_draws[system][0]
    usual = int(np.abs(np.divide(result.step_seconds, result.step_work_seconds) - 1 / result.work_rate).argmin())
    return timeline(next(StepPlanner(result.job, lengths).plans(verdict.warm_up + usual)), result.job)
