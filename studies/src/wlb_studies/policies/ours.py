"""The presets of this project: plain-4D, per-document-4D, fixed-4D, WLB-LLM and balanced.

Layouts, steps and speeds are the same as in ``wlb check``: the same search and the same simulation of each draw.
"""

import time
from dataclasses import dataclass, replace
from itertools import islice

from wlb.job.job import Job
from wlb.job.memory.fit import predicted_memory
from wlb.job.planner import StepPlanner
from wlb.schedules.layout import Head
from wlb.simulate.rate import simulate_steps
from wlb.simulate.run import pooled
from wlb.simulate.search import fastest_layout
from wlb.simulate.space import SearchSpace
from wlb.simulate.verdict import simulate_draws, usual_steps
from wlb_studies.policies.layouts import layout_of
from wlb_studies.policies.plan import Integers
from wlb_studies.policies.policy import Outcome, Policy
from wlb_studies.policies.pricing import received_bytes

_MEASURED = 4  # steps whose planning is timed, and whose exchange is counted


@dataclass(frozen=True)
class PresetPolicy(Policy):
    """A ``preset``, by default the one with the policy's name; ``head`` is where its pipelines have the output head.

    "auto" is as in ``wlb check``: ``balanced`` chooses, and others have it on the last stage.
    """

    preset: str = ""
    head: Head = "auto"

    def best(self, name: str, space: SearchSpace, lengths: Integers, steps: int | None = None) -> Outcome:
        steps = steps or usual_steps(space.global_batch)
        space = replace(space, fixed={**space.fixed, "head": self.head})
        found = fastest_layout(space, lengths, self.preset or name)
        results = [*simulate_draws(found.job, lengths, steps, space.work_prices)]
        job, together = results[0].job, pooled(results)
        exchanged, planning = _measured(job, lengths, min(steps, _MEASURED))
        return Outcome(
            policy=name,
            layout=f"{layout_of(job)}, {job.activation_checkpointing}{_pools_of(job)}",
            steps=steps,
            draw_tokens=[result.tokens for result in results],
            draw_seconds=[result.seconds for result in results],
            draw_work=[result.work_seconds for result in results],
            token_delay=together.token_delay,
            tokens_cv=together.tokens_cv,
            exchanged_bytes=exchanged,
            memory_bytes=predicted_memory(job).total,
            planning_seconds=planning,
            tried=found.layouts,
            attention_kept=together.attention_kept,
        )


def _pools_of(job: Job) -> str:
    if not job.packing.is_balanced:
        return ""
    return ", level steps" if job.levels_steps else f", {job.rank_micro_batches} {job.packing.grouping} micro-batches"


def _measured(job: Job, lengths: Integers, steps: int) -> tuple[float, float]:
    """Bytes that the mean GPU receives in a step, and CPU seconds to plan a step on this machine."""
    warm_up = usual_steps(job.global_batch)
    began = time.process_time()
    plans = [*islice(StepPlanner(job, lengths).plans(warm_up), steps)]
    planning = (time.process_time() - began) / (warm_up + steps)
    received = received_bytes(simulate_steps(plans, job).shards, job)
    return received / steps / (job.layout.pools * job.layout.pool_size * job.layout.pp), planning
