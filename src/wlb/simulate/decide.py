"""Decides what a job leaves "auto": L_max by its memory, and before that its pools by simulation.

Trainer, dry run, simulator, batches, report and rivals all call ``decide``, so that the same job runs everywhere.

Of pools, their size, micro-batches and the grouping of documents are chosen. More micro-batches fill a pipeline better,
and larger pools hold more of a document; but small micro-batches leave a long document alone in one, and in large pools
its keys and values travel further. Documents of like lengths exchange least, and leave micro-batches that cost
unequally. What is fastest depends on all of the job and on its documents, so a few steps are planned and simulated for
every choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np

from wlb.documents.mixture import DocumentLengths
from wlb.errors import UserError
from wlb.packing.elastic import ElasticOptions, Grouping
from wlb.planning.job import JobSpec
from wlb.planning.memory import fits, largest_factor, too_large
from wlb.planning.planner import StepPlanner, documents_together
from wlb.schedules.operations import round_size
from wlb.settings import MOST_MICRO_BATCHES
from wlb.simulate.costs import JobCosts
from wlb.simulate.job import SimulatedJob
from wlb.simulate.step import simulate_steps
from wlb.workload.base import DocumentPrices

J = TypeVar("J", bound=JobSpec)

_STEPS = 4  # that are simulated for a choice, fewer where they are of many micro-batches
_MICRO_BATCHES = 48
_DOCUMENTS = 65_536
_WINDOWS = 512  # of all these steps; a larger global batch is decided on by a part of it
_FILLINGS = (1, 1.5, 2, 2.5, 3, 4, 6)  # micro-batches of a pool for each of its pipeline ranks
_SMALLER = (1.15, 1.3)  # times as many, where so few are too large for the memory
_LEAST_WINDOWS = 0.5  # of documents in a mean micro-batch
_CLEARLY = 0.01  # of the seconds, that grouping documents alike must save: how it does depends on a step's documents


class _Pools(NamedTuple):
    too_large: bool  # for the memory
    no_room: bool  # for some document, which has to wait though none should
    seconds: float  # for a second of work
    pool: int
    micro_batches: int
    grouping: Grouping


def decide(job: J, lengths: DocumentLengths) -> J:
    """``job`` with nothing left "auto"; the same job and documents always give the same.

    Context-parallel groups become its pools: those given, or the fastest on documents of ``lengths``. L_max becomes the
    most that ``job.memory_limit`` allows. Raises ``UserError`` for pools that are given and cannot run, where none can,
    and for an L_max that is "auto" where memory does not hold one context window. Pools and an L_max that do not fit
    are not refused here.
    """
    job = _with_pools(job, lengths)
    if job.packing.length_factor != "auto":
        return job
    decided = _with_length(job)
    if not isinstance(job.packing.options, ElasticOptions) and (problem := too_large(decided)):
        raise UserError(problem)
    return decided


def _with_length(job: J) -> J:
    """With the largest L_max that fits; where none does, with the least."""
    return job.with_length_factor(largest_factor(job) or job.least_length_factor)


def _with_pools(job: J, lengths: DocumentLengths) -> J:
    if job.pools_decided:
        return job
    options = job.packing.options
    assert isinstance(options, ElasticOptions)
    if job.pool != "auto" and options.pool_micro_batches != "auto":
        return job.with_pools(job.pool, options.pool_micro_batches)
    parts = -(-job.global_batch // _WINDOWS)
    part = _part(job, parts)
    fastest: _Pools | None = None
    for pool in _sizes(job):
        choices = _choices(part, pool, parts)
        best = min((_priced(choice, lengths, job.workload) for choice in choices), default=None)
        if fastest is not None and (best is None or best >= fastest):
            break  # nor would smaller ones be faster
        fastest = best or fastest
    if fastest is None:
        if options.pool_micro_batches != "auto":
            job.with_pools(next(_sizes(job)), options.pool_micro_batches)  # says why, where it is refused for its size
        raise UserError(
            f"no pool of dp x cp = {job.dp * job.cp} ranks can run a global batch of {job.global_batch} "
            "context windows in this pipeline; give pool and pool_micro_batches to learn why"
        )
    if options.pool_micro_batches != "auto":
        return job.with_pools(fastest.pool, options.pool_micro_batches, fastest.grouping)
    micro_batches = fastest.micro_batches * parts
    if micro_batches % round_size(job.pp, micro_batches):  # a pipeline that runs in rounds
        micro_batches = -(-micro_batches // job.pp) * job.pp
    return job.with_pools(fastest.pool, micro_batches, fastest.grouping)


def _part(job: JobSpec, parts: int) -> SimulatedJob:
    """What is simulated: ``job`` with one of ``parts`` equal parts of its global batch."""
    options = job.packing.options
    assert isinstance(options, ElasticOptions)
    part = SimulatedJob(**{field.name: getattr(job, field.name) for field in fields(JobSpec)})
    if parts == 1:
        return part
    sizes: dict[str, int] = {"global_batch": job.global_batch // parts}
    if options.pool_micro_batches != "auto":
        sizes["pool_micro_batches"] = max(1, options.pool_micro_batches // (parts * job.pp)) * job.pp
    return replace(part, packing=job.packing.model_copy(update=sizes))


def _sizes(job: JobSpec) -> Iterator[int]:
    """The size that is given; or all that hold whole context-parallel groups, the largest first."""
    if job.pool != "auto":
        yield job.pool
        return
    for pools in range(1, job.dp + 1):
        if job.dp % pools == 0:
            yield job.dp // pools * job.cp


def _choices(job: SimulatedJob, pool: int, parts: int) -> Iterator[SimulatedJob]:
    """The job with pools of this size, every number of micro-batches that they could run, and every grouping."""
    options = job.packing.options
    assert isinstance(options, ElasticOptions)
    groupings: tuple[Grouping, ...] = ("even", "alike")
    if options.grouping != "auto" or options.max_delay or options.lookahead:
        groupings = ("alike" if options.grouping == "alike" else "even",)
    for of_count in _with_counts(job, pool, parts):
        for grouping in groupings:
            yield of_count.with_pools(pool, of_count.micro_batches_per_rank, grouping)


def _with_counts(job: SimulatedJob, pool: int, parts: int) -> list[SimulatedJob]:
    """The job with pools of this size and numbers of micro-batches; more where the GPUs hold none of the usual ones."""
    options = job.packing.options
    assert isinstance(options, ElasticOptions)
    share = pool / (job.dp * job.cp)
    most = int(share * min(job.global_batch / _LEAST_WINDOWS, MOST_MICRO_BATCHES / parts))
    if options.pool_micro_batches != "auto":
        return _that_run(job, pool, [options.pool_micro_batches])
    counts = [round(filling * job.pp) for filling in _FILLINGS]
    counts = [count for count in counts if count <= most] or counts[:1]
    while True:
        runnable = _that_run(job, pool, counts)
        fitting = [choice for choice in runnable if fits(choice)]
        smaller = [math.ceil(counts[-1] * times / job.pp) * job.pp for times in _SMALLER]
        if fitting or smaller[0] > most:
            return fitting or runnable
        counts = smaller


def _that_run(job: SimulatedJob, pool: int, counts: Iterable[int]) -> list[SimulatedJob]:
    jobs = []
    for count in sorted(set(counts)):
        try:
            of_count = job.with_pools(pool, count)
            jobs.append(_with_length(of_count) if of_count.packing.length_factor == "auto" else of_count)
        except UserError:
            continue  # a pipeline that runs in rounds
    return jobs


def _priced(job: SimulatedJob, lengths: DocumentLengths, prices: DocumentPrices) -> _Pools:
    options = job.packing.options
    assert isinstance(options, ElasticOptions)
    planner = StepPlanner(job, lengths)
    most = (
        _MICRO_BATCHES // job.packing.micro_batches,
        _WINDOWS // job.global_batch,
        _DOCUMENTS // max(1, documents_together(job, lengths)),
    )
    steps = max(1, min(_STEPS, *most))
    plans = [*islice(planner.plans(), steps)]
    table = np.concatenate([plan.table for plan in plans])
    work = float(prices.document_seconds(table[:, 2]).sum())
    seconds = float(simulate_steps(plans, JobCosts(job)).seconds.sum())
    expected = steps * job.global_batch * job.context_window
    no_room = not options.max_delay and int(table[:, 2].sum()) < expected
    grouping: Grouping = "alike" if options.grouping == "alike" else "even"
    if grouping == "alike":
        seconds *= 1 + _CLEARLY
    return _Pools(not fits(job), no_room, seconds / work, job.cp, job.micro_batches_per_rank, grouping)
