"""Decides what a job leaves "auto": L_max by its memory, and before that its pools by simulation.

Trainer, dry run, simulator, batches, report and rivals all call ``decide``, so that the same job runs everywhere.

Of pools, their size, micro-batches and the grouping of documents are chosen; or, without a pipeline, that ranks run
micro-batches of their own, level over a step. More micro-batches fill a pipeline better,
and larger pools hold more of a document; but small micro-batches leave a long document alone in one, and in large pools
its keys and values travel further. Documents of like lengths exchange least, and leave micro-batches that cost
unequally. What is fastest depends on all of the job and on its documents, so a few steps are planned and simulated for
every choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from wlb.documents.length_counts import DocumentLengths
from wlb.errors import UserError
from wlb.job.job import JobSpec
from wlb.job.memory.fit import fits, largest_factor, too_large
from wlb.job.planner import documents_together
from wlb.job.pricing import Pricing
from wlb.packing.options import Grouping, Pools
from wlb.schedules.operations import round_size
from wlb.settings import MOST_MICRO_BATCHES
from wlb.simulate.level import LevelPrices
from wlb.simulate.rate import rate
from wlb.workload.base import DocumentPrices

_STEPS = 4  # that are simulated for a choice, fewer where they are of many micro-batches
_MICRO_BATCHES = 48
_DOCUMENTS = 65_536
_WINDOWS = 512  # of all these steps; a larger global batch is decided on by a part of it
_FILLINGS = (1, 1.5, 2, 2.5, 3, 4, 6)  # micro-batches of a pool for each of its pipeline ranks
_SMALLER = (1.15, 1.3)  # times as many, where so few are too large for the memory
_LEAST_WINDOWS = 0.5  # of documents in a mean micro-batch
_CLEARLY = 0.01  # of the seconds, that grouping documents alike must save: how it does depends on a step's documents


def decide(job: JobSpec, lengths: DocumentLengths, *, lock_step: bool = False) -> JobSpec:
    """``job`` with nothing left "auto"; the same job and documents always give the same.

    Context-parallel groups become its pools: those given, or the fastest on documents of ``lengths``. L_max becomes the
    most that ``job.memory_limit`` allows. With ``lock_step`` the ranks of a pool cannot run micro-batches of their own,
    as in loops that know fixed context-parallel groups only. Raises ``UserError`` for pools that are given and cannot
    run, where none can, and for an L_max that is "auto" where memory does not hold one context window. Pools and an
    L_max that do not fit are not refused here.
    """
    pools = job.pools
    if pools is not None and not job.pools_decided:
        job = job.with_pools(_fastest(job, pools, lengths, lock_step=lock_step))
    decided = _with_length(job)
    if pools is None and job.packing.length_factor == "auto" and (problem := too_large(decided)):
        raise UserError(problem)
    return decided


def _with_length(job: JobSpec) -> JobSpec:
    """With the largest L_max that fits, where it is "auto"; where none does, with the least.

    Level steps are planned by the prices of ranks that hold a part of it.
    """
    if job.packing.length_factor == "auto":
        job = job.with_length_factor(largest_factor(job) or job.least_length_factor)
    if job.levels_steps:
        own = replace(job, pricing=Pricing(job.hardware))  # whatever a simulation prices steps by
        job = job.priced(packed_by=LevelPrices(own))
    return job


def _fastest(job: JobSpec, pools: Pools, lengths: DocumentLengths, *, lock_step: bool) -> Pools:
    if pools.grouping == "level":
        if lock_step:
            raise UserError(
                "grouping = 'level' has ranks run micro-batches of their own, which this loop cannot; leave it out"
            )
        return replace(pools, size=job.layout.replicas)
    if pools.size != "auto" and pools.micro_batches != "auto":
        return pools
    parts = -(-pools.global_batch // _WINDOWS)
    part = replace(pools, global_batch=pools.global_batch // parts)
    if parts > 1 and pools.micro_batches != "auto":
        part = replace(part, micro_batches=max(1, pools.micro_batches // (parts * job.layout.pp)) * job.layout.pp)
    own = replace(job, pricing=Pricing(job.hardware))  # the trainer's prices, whatever a simulation prices steps by
    search = _PoolChoices(own, part, parts, lock_step)
    fastest: _PricedPools | None = None
    for size in search.sizes():
        best = min((_priced(choice, lengths, job.workload) for choice in search.choices(size)), default=None)
        if fastest is not None and (best is None or best >= fastest):
            break  # nor would smaller ones be faster
        fastest = best or fastest
    if fastest is None:
        if pools.micro_batches != "auto":
            job.with_pools(replace(pools, size=next(search.sizes())))  # says why, where it is refused for its size
        raise UserError(
            f"no pool of dp x cp = {job.layout.replicas} ranks can run a global batch of {pools.global_batch} "
            "context windows in this pipeline; give pool and pool_micro_batches to learn why"
        )
    micro_batches = pools.micro_batches
    if micro_batches == "auto" and fastest.grouping != "level":
        micro_batches = fastest.micro_batches * parts
        if micro_batches % round_size(job.layout.pp, micro_batches):  # a pipeline that runs in rounds
            micro_batches = -(-micro_batches // job.layout.pp) * job.layout.pp
    return replace(pools, size=fastest.size, micro_batches=micro_batches, grouping=fastest.grouping)


@dataclass(frozen=True)
class _PoolChoices:
    """``job`` with all ``pools`` that it could have, for one of ``parts`` equal parts of its global batch."""

    job: JobSpec
    pools: Pools
    parts: int
    lock_step: bool

    def sizes(self) -> Iterator[int]:
        """The size that is given; or all that hold whole context-parallel groups, the largest first."""
        if self.pools.size != "auto":
            yield self.pools.size
            return
        layout = self.job.layout
        for number in range(1, layout.dp + 1):
            if layout.dp % number == 0:
                yield layout.dp // number * layout.cp

    def choices(self, size: int) -> Iterator[JobSpec]:
        """The job with pools of this size, every number of micro-batches that they could run, and every grouping."""
        wanted, layout = self.pools.grouping, self.job.layout
        groupings: tuple[Grouping, ...] = ("even", "alike") if wanted == "auto" else (wanted,)
        for job in self._with_counts(size):
            for grouping in groupings:
                yield replace(job, packing=job.packing.changed(grouping=grouping))
        free = (wanted, self.pools.micro_batches) == ("auto", "auto") and not self.lock_step
        if free and layout.pp == 1 and size == layout.replicas:
            yield _with_length(self.job.with_pools(replace(self.pools, size=size, grouping="level")))

    def _with_counts(self, size: int) -> list[JobSpec]:
        """With pools of this size and numbers of micro-batches; more where the GPUs hold none of the usual ones."""
        if self.pools.micro_batches != "auto":
            return self._that_run(size, [self.pools.micro_batches])
        pp, share = self.job.layout.pp, size / (self.job.layout.replicas)
        most = int(share * min(self.pools.global_batch / _LEAST_WINDOWS, MOST_MICRO_BATCHES / self.parts))
        counts = [round(filling * pp) for filling in _FILLINGS]
        counts = [count for count in counts if count <= most] or counts[:1]
        while True:
            runnable = self._that_run(size, counts)
            fitting = [choice for choice in runnable if fits(choice)]
            smaller = [math.ceil(counts[-1] * times / pp) * pp for times in _SMALLER]
            if fitting or smaller[0] > most:
                return fitting or runnable
            counts = smaller

    def _that_run(self, size: int, counts: Iterable[int]) -> list[JobSpec]:
        jobs = []
        for count in sorted(set(counts)):
            try:
                job = self.job.with_pools(replace(self.pools, size=size, micro_batches=count))
            except UserError:
                continue  # a pipeline that runs in rounds
            jobs.append(_with_length(job))
        return jobs


class _PricedPools(NamedTuple):
    """The least is the best."""

    too_large: bool  # for the memory
    no_room: bool  # for some document, which has to wait though none should
    seconds: float  # for a second of work
    size: int
    micro_batches: int
    grouping: Grouping


def _priced(job: JobSpec, lengths: DocumentLengths, prices: DocumentPrices) -> _PricedPools:
    most = (
        _MICRO_BATCHES // job.packing.micro_batches,
        _WINDOWS // job.global_batch,
        _DOCUMENTS // max(1, documents_together(job, lengths)),
    )
    steps = max(1, min(_STEPS, *most))
    rated = rate(job, lengths, steps, prices)
    waits = job.pools is not None and job.pools.delays
    no_room = not waits and sum(rated.step_tokens) < steps * job.global_batch * job.context_window
    grouping = job.pools.grouping if job.pools is not None and job.pools.grouping != "auto" else "even"
    seconds = 1 / rated.work_rate * (1 + _CLEARLY if grouping == "alike" else 1.0)
    return _PricedPools(not fits(job), no_room, seconds, job.layout.cp, job.micro_batches_per_rank, grouping)
