"""Elastic pools among the rivals: in the layouts that policies without fixed groups choose from.

In each layout the pools, their micro-batches and L_max are those that the trainer decides on (``wlb.simulate.decide``).
In the fastest layout other kinds of activation checkpointing are tried too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.job.memory.fit import fits
from wlb.simulate.decide import decide
from wlb.simulate.job import SimulatedJob, preset_sections
from wlb.simulate.rate import rate
from wlb.simulate.run import simulate
from wlb.simulate.search import SearchSpace
from wlb.studies.policies.layouts import candidate_ranks, checkpointed, no_layout
from wlb.studies.policies.ours import outcome_of
from wlb.studies.policies.plan import Ranks
from wlb.studies.policies.policy import Outcome, first_batches
from wlb.workload.base import DocumentPrices


@dataclass(frozen=True)
class ElasticPolicy:
    """A ``Policy``: the preset ``elastic``."""

    source: str
    assumed: str = ""

    def best(self, name: str, space: SearchSpace, lengths: NDArray[np.int64], work_prices: DocumentPrices) -> Outcome:
        job, tried = self.fastest(name, space, lengths, work_prices)
        result = simulate(job, lengths, space.steps, work_prices=work_prices)
        return outcome_of(name, result, lengths, tried, _text(job))

    def fastest(
        self, name: str, space: SearchSpace, lengths: NDArray[np.int64], work_prices: DocumentPrices
    ) -> tuple[SimulatedJob, int]:
        """The job of the best layout, and how many were tried."""
        documents = first_batches(lengths, replace(space, steps=1))[0]
        tried: dict[SimulatedJob, tuple[float, Ranks]] = {}

        def attempt(ranks: Ranks) -> None:
            try:
                job = decided_in(ranks.job, space, lengths)
            except UserError:
                return  # no pool can run the global batch in this pipeline
            if fits(job):
                tried[job] = _work_rate(job, lengths, work_prices), ranks

        def fastest() -> SimulatedJob:
            return max(tried, key=lambda job: tried[job][0])

        for ranks in candidate_ranks(space, documents, pipelines=True, interleaves=True, keeps_weights=False):
            attempt(ranks)
        for ranks in checkpointed(tried[fastest()][1], space) if tried else []:
            attempt(ranks)
        if not tried or tried[fastest()][0] == 0.0:
            raise no_layout(name, space)
        return fastest(), len(tried)


def decided_in(layout: SimulatedJob, space: SearchSpace, lengths: NDArray[np.int64]) -> SimulatedJob:
    """What the trainer runs where dp ranks of ``layout`` train a global batch of ``space`` in pools."""
    options = {"micro_batches": layout.layout.dp, "global_batch": space.micro_batches}
    packing, sharding = preset_sections("elastic", options)
    return decide(replace(layout, packing=packing, sharding=sharding), lengths)


def _work_rate(job: SimulatedJob, lengths: NDArray[np.int64], work_prices: DocumentPrices) -> float:
    """Of one step; 0 where a document finds no room in it."""
    rated = rate(job, lengths, 1, work_prices)
    return 0.0 if rated.step_tokens[0] < job.global_batch * job.context_window else rated.work_rate


def _text(job: SimulatedJob) -> str:
    pools = f"{job.layout.dp} pool{'s' if job.layout.dp > 1 else ''} of {job.layout.cp} ranks"
    stages = f" x {job.layout.virtual_pp} stages" if job.layout.virtual_pp > 1 else ""
    grouping = job.pools.grouping if job.pools else "even"
    micro_batches = f"{job.micro_batches_per_rank} micro-batches, {grouping}"
    return f"tp {job.layout.tp} pp {job.layout.pp}{stages}, {pools}, {micro_batches}, {job.activation_checkpointing}"
