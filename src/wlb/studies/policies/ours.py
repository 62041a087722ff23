"""Systems that the simulator runs as they are: plain-4D, fixed-4D, WLB-LLM and best.

Their steps come from the trainer's planner and are priced by ``wlb.simulate.simulate``, unchanged. Layouts are those of
``wlb simulate --search``; of the most promising ones the fastest under fixed-4D are tried with every system.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from wlb.job.memory.fit import predicted_memory
from wlb.job.planner import StepPlanner
from wlb.simulate.costs import JobCosts
from wlb.simulate.job import SimulatedJob
from wlb.simulate.rate import rate
from wlb.simulate.run import SimulationResult, simulate
from wlb.simulate.search import SearchSpace, fitted, layout_of, layouts, packed_as
from wlb.simulate.shards import price_shards
from wlb.studies.policies.exchange import kv_bytes
from wlb.studies.policies.layouts import no_layout
from wlb.studies.policies.plan import Ranks
from wlb.studies.policies.policy import Outcome, first_batches
from wlb.studies.policies.pricing import ideal_seconds
from wlb.workload.base import DocumentPrices

_SCREENED = 16  # layouts of which one step is simulated under fixed-4d
_TRIED = 4  # of them under every system, and as many of the most promising
_SCREEN = "fixed-4d"
# Steps for one that is asked for, of systems in which documents wait: at first long ones wait for others as dear,
# and steps do less work than later ones.
LONGER = 4


@dataclass(frozen=True)
class SystemPolicy:
    """One of the presets of ``wlb.job.config.PRESETS``."""

    preset: str
    source: str
    assumed: str = ""
    delays: bool = False  # documents, so that its first steps are unlike later ones

    def best(self, name: str, space: SearchSpace, lengths: NDArray[np.int64], work_prices: DocumentPrices) -> Outcome:
        job, tried = self.fastest(name, space, lengths, work_prices)
        result = simulate(job, lengths, self._longer * space.steps, work_prices=work_prices)
        return outcome_of(name, result, lengths, tried, f"{layout_of(job)}, {job.activation_checkpointing}")

    def fastest(
        self, name: str, space: SearchSpace, lengths: NDArray[np.int64], work_prices: DocumentPrices
    ) -> tuple[SimulatedJob, int]:
        """The job of the best layout, and how many were tried."""
        jobs = _packed_jobs(self.preset, _screened(space, lengths.tobytes()))
        if not jobs:
            raise no_layout(name, space)
        return max(jobs, key=lambda job: rate(job, lengths, self._longer, work_prices).work_rate), len(jobs)

    @property
    def _longer(self) -> int:
        return LONGER if self.delays else 1


def _packed_jobs(preset: str, screened: Sequence[SimulatedJob]) -> list[SimulatedJob]:
    packed = (packed_as(job, preset).with_length_factor(float(job.packing.length_factor)) for job in screened)
    return [job for job in map(fitted, packed) if job is not None]


@lru_cache(maxsize=2)
def _screened(space: SearchSpace, lengths_bytes: bytes) -> tuple[SimulatedJob, ...]:
    """The layouts fastest for a step of fixed-4D, and the most promising. Raises ``UserError`` where none fits."""
    lengths = np.frombuffer(lengths_bytes, np.int64)
    fitting, _ = layouts(space)
    if not fitting:
        raise no_layout(_SCREEN, space)
    documents = first_batches(lengths, replace(space, steps=1))[0]
    fitting.sort(key=lambda job: ideal_seconds(documents, _as_ranks(job)))
    promising = fitting[:_SCREENED]
    work_prices = promising[0].work_prices
    fastest = sorted(promising, key=lambda job: -rate(packed_as(job, _SCREEN), lengths, 1, work_prices).work_rate)
    return tuple(dict.fromkeys(fastest[:_TRIED] + promising[:_TRIED]))


def _as_ranks(job: SimulatedJob) -> Ranks:
    ranks = job.layout.dp * job.layout.cp
    packing = packed_as(job, _SCREEN).packing.changed(micro_batches=ranks * job.layout.pp)
    return Ranks(replace(job, packing=packing).with_layout(cp=1, dp=ranks), -(-job.context_window // job.layout.cp))


def outcome_of(name: str, result: SimulationResult, lengths: NDArray[np.int64], tried: int, layout: str) -> Outcome:
    """The ``Outcome`` of a simulated job; planning, sharding included, is measured here."""
    job, steps = result.job, result.steps
    began = time.perf_counter()
    plans = [*islice(StepPlanner(job, lengths).plans(), steps)]
    shards = price_shards([m.lengths for plan in plans for m in plan.micro_batches], JobCosts(job))
    planning = time.perf_counter() - began
    again = job.activation_checkpointing == "full"
    times = np.where(shards.kept & (not again), 2, 3)  # there, gradients back, and there again
    received = float((shards.received.sum(axis=1) * times).sum()) / steps
    return Outcome(
        policy=name,
        layout=layout,
        steps=steps,
        tokens=result.tokens,
        work_seconds=result.work_seconds,
        seconds=result.seconds,
        token_delay=result.token_delay,
        tokens_cv=result.tokens_cv,
        exchanged_bytes=received * kv_bytes(job) * job.shape.layers / (job.layout.dp * job.layout.cp * job.layout.pp),
        memory_bytes=predicted_memory(job).total,
        planning_seconds=planning / steps,
        tried=tried,
    )
