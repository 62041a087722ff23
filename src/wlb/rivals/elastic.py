"""Elastic pools among the rivals: in the layouts that policies without fixed groups choose from.

A pool takes as many tokens of a micro-batch as its ranks hold, and documents of like lengths, as a first guess. In the
fastest layouts other sizes of pools, shorter micro-batches, other activation checkpointing and micro-batches of even
workload are tried, each by planning and simulating a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.packing.elastic import ElasticOptions, Grouping
from wlb.planning.memory import fits
from wlb.rivals.layouts import candidate_ranks, checkpointed, no_layout
from wlb.rivals.ours import outcome_of
from wlb.rivals.plan import Ranks
from wlb.rivals.policy import Outcome, first_batches
from wlb.simulate.job import SimulatedJob, preset_sections, with_decided_length
from wlb.simulate.rate import rate
from wlb.simulate.run import simulate
from wlb.simulate.search import SearchSpace
from wlb.workload.base import DocumentPrices

_LEADERS = 2  # layouts in which more is tried
_LARGEST_POOL = 64  # ranks; keys and values of a long document go to all that share it
_SMALLER_POOLS = 2  # half and a quarter of the largest
_FULL = 0.97  # of what its ranks hold, the mean micro-batch: best fit leaves less than the rest over
_SHORTER = (0.7, 0.5)
_EVEN = 0.85  # where micro-batches are even in workload, and so differ in tokens


@dataclass(frozen=True)
class ElasticPolicy:
    """A ``Policy``: the preset ``elastic``."""

    source: str
    assumed: str = ""

    def best(self, name: str, space: SearchSpace, lengths: NDArray[np.int64], work_prices: DocumentPrices) -> Outcome:
        documents = first_batches(lengths, replace(space, steps=1))[0]
        rates: dict[SimulatedJob, float] = {}
        layout_of_job: dict[SimulatedJob, Ranks] = {}

        def attempt(ranks: Ranks, jobs: Iterable[SimulatedJob]) -> None:
            for job in jobs:
                if job not in rates and fits(job, job.memory_limit):
                    rates[job] = _work_rate(job, lengths, work_prices)
                    layout_of_job[job] = ranks

        def leaders() -> list[Ranks]:
            fastest_first = sorted(rates, key=lambda job: -rates[job])
            return [*dict.fromkeys(layout_of_job[job] for job in fastest_first)][:_LEADERS]

        for ranks in candidate_ranks(space, documents, pipelines=True, interleaves=True, keeps_weights=False):
            attempt(ranks, _pooled(ranks, space, _sizes(ranks)[:1]))
        for ranks in leaders()[:1]:
            for other in checkpointed(ranks, space):
                attempt(other, _pooled(other, space, _sizes(other)[:1]))
        for ranks in leaders():
            sizes = _sizes(ranks)
            attempt(ranks, _pooled(ranks, space, sizes[1 : 1 + _SMALLER_POOLS]))
            for share in _SHORTER:
                attempt(ranks, _pooled(ranks, space, sizes[:1], share))
            attempt(ranks, _pooled(ranks, space, sizes[:1], _EVEN, "even"))
        if not rates or max(rates.values()) == 0.0:
            raise no_layout(name, space)
        job = max(rates, key=lambda job: rates[job])
        result = simulate(job, lengths, space.steps, work_prices=work_prices)
        return outcome_of(name, result, lengths, len(rates), _text(job))


def _sizes(ranks: Ranks) -> list[int]:
    """Pools that hold a window and divide the ranks, largest first; where all are too large, the smallest of them."""
    halves = (ranks.count >> exponent for exponent in range(ranks.count.bit_length()))
    sizes = [size for size in halves if ranks.count % size == 0 and size * ranks.capacity >= ranks.window]
    return [size for size in sizes if size <= _LARGEST_POOL] or sizes[-1:]


def _pooled(
    ranks: Ranks, space: SearchSpace, sizes: Iterable[int], share: float = _FULL, grouping: Grouping = "alike"
) -> Iterator[SimulatedJob]:
    """The job with pools of ``sizes`` ranks, whose mean micro-batch has a ``share`` of the tokens that they hold."""
    packing, sharding = preset_sections("elastic", {"micro_batches": space.micro_batches})
    job = replace(ranks.job, packing=packing, sharding=sharding)
    for size in sizes:
        windows = space.micro_batches * size / ranks.count
        count = math.ceil(windows * space.context_window / (share * ranks.capacity * size))
        rounds = max(1, -(-count // job.pp))
        try:
            yield with_decided_length(job.with_pools(size, rounds * job.pp, grouping))
        except UserError:
            continue  # more micro-batches than a job may have


def _work_rate(job: SimulatedJob, lengths: NDArray[np.int64], work_prices: DocumentPrices) -> float:
    """Of one step; 0 where a document finds no room in it."""
    rated = rate(job, lengths, 1, work_prices)
    return 0.0 if rated.step_tokens[0] < job.global_batch * job.context_window else rated.work_rate


def _text(job: SimulatedJob) -> str:
    options = job.packing.options
    assert isinstance(options, ElasticOptions)
    pools = f"{job.dp} pool{'s' if job.dp > 1 else ''} of {job.cp} ranks"
    stages = f" x {job.virtual_pp} stages" if job.virtual_pp > 1 else ""
    micro_batches = f"{job.micro_batches_per_rank} micro-batches, {options.grouping}"
    return f"tp {job.tp} pp {job.pp}{stages}, {pools}, {micro_batches}, {job.activation_checkpointing}"
