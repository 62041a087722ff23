"""Chooses the size of pools and their micro-batches by simulation, where a job leaves them "auto".

More micro-batches fill a pipeline better, and larger pools hold more of a document; but small micro-batches leave a
long document alone in one, and in large pools its keys and values travel further. What is fastest depends on all of the
job and on its documents, so a few steps are planned and simulated for every choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np

from wlb.documents.mixture import DocumentLengths
from wlb.errors import UserError
from wlb.packing.elastic import ElasticOptions
from wlb.planning.job import JobSpec
from wlb.planning.memory import fits
from wlb.planning.planner import StepPlanner
from wlb.simulate.costs import JobCosts
from wlb.simulate.job import SimulatedJob, with_decided_length
from wlb.simulate.step import simulate_steps
from wlb.workload.base import DocumentPrices

J = TypeVar("J", bound=JobSpec)

_STEPS = 4  # that are simulated for a choice, fewer where they are of many micro-batches
_MICRO_BATCHES = 48
_FILLINGS = (1, 1.5, 2, 2.5, 3, 4, 6)  # micro-batches of a pool for each of its pipeline ranks
_LEAST_WINDOWS = 0.5  # of documents in a mean micro-batch


class _Pools(NamedTuple):
    too_large: bool  # for the memory of the GPUs
    seconds: float  # for a second of work
    pool: int
    micro_batches: int


def with_decided_pools(job: J, lengths: DocumentLengths) -> J:
    """``job`` with context-parallel groups that are its pools: those given, or the fastest on documents of ``lengths``.

    The same job and documents give the same pools. Raises ``UserError`` for pools that are given and cannot run, and
    where none can.
    """
    if job.pools_decided:
        return job
    options = job.packing.options
    assert isinstance(options, ElasticOptions)
    if job.pool != "auto" and options.pool_micro_batches != "auto":
        return job.with_pools(job.pool, options.pool_micro_batches)
    simulated = SimulatedJob(**{field.name: getattr(job, field.name) for field in fields(JobSpec)})
    fastest: _Pools | None = None
    for pool in _sizes(job):
        best = min((_priced(choice, lengths, job.workload) for choice in _choices(simulated, pool)), default=None)
        if fastest is not None and (best is None or best >= fastest):
            break  # nor would smaller ones be faster
        fastest = best or fastest
    if fastest is None:
        raise UserError(
            f"no pool of dp x cp = {job.dp * job.cp} ranks can run a global batch of {job.global_batch} "
            "context windows in this pipeline; give pool and pool_micro_batches to learn why"
        )
    return job.with_pools(fastest.pool, fastest.micro_batches)


def _sizes(job: JobSpec) -> Iterator[int]:
    """The size that is given; or all that hold whole context-parallel groups, the largest first."""
    if job.pool != "auto":
        yield job.pool
        return
    for pools in range(1, job.dp + 1):
        if job.dp % pools == 0:
            yield job.dp // pools * job.cp


def _choices(job: SimulatedJob, pool: int) -> Iterator[SimulatedJob]:
    """The job with pools of this size, and every number of micro-batches that they could run."""
    options = job.packing.options
    assert isinstance(options, ElasticOptions)
    windows = job.global_batch * pool / (job.dp * job.cp)
    counts = [round(filling * job.pp) for filling in _FILLINGS]
    if options.pool_micro_batches != "auto":
        counts = [options.pool_micro_batches]
    for count in sorted({count for count in counts if count * _LEAST_WINDOWS <= windows} or {min(counts)}):
        try:
            yield with_decided_length(job.with_pools(pool, count))
        except UserError:
            continue  # a pipeline that runs in rounds


def _priced(job: SimulatedJob, lengths: DocumentLengths, prices: DocumentPrices) -> _Pools:
    steps = min(_STEPS, max(1, _MICRO_BATCHES // job.packing.micro_batches))
    plans = [*islice(StepPlanner(job, lengths).plans(), steps)]
    table = np.concatenate([plan.table for plan in plans])
    work = float(prices.document_seconds(table[:, 2]).sum())
    seconds = float(simulate_steps(plans, JobCosts(job)).seconds.sum())
    # What a machine with CPUs can hold is not known here.
    too_large = job.hardware.device_type == "cuda" and not fits(job, job.memory_limit)
    return _Pools(too_large, seconds / work, job.cp, job.micro_batches_per_rank)
