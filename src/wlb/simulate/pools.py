"""How large pools are and how many micro-batches they run in a step, where a job leaves that to be decided.

More micro-batches fill a pipeline better, and larger pools hold more of a document; but small micro-batches leave a
long document alone in one, and in large pools its keys and values travel further. What is fastest depends on all of the
job and on its documents, so a few steps are planned and simulated for every choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.packing.elastic import ElasticOptions
from wlb.planning.planner import StepPlanner
from wlb.simulate.costs import JobCosts
from wlb.simulate.job import SimulatedJob, with_decided_length
from wlb.simulate.step import simulate_steps

J = TypeVar("J", bound=SimulatedJob)

_STEPS = 4  # that are simulated for a choice
_FILLINGS = (1, 1.5, 2, 3, 4, 6)  # micro-batches of a pool, over the least with which its pipeline runs without a gap
_LEAST_WINDOWS = 0.5  # of documents in a mean micro-batch


def with_decided_pools(job: J, lengths: NDArray[np.int64]) -> J:
    """``job`` with context-parallel groups that are its pools: those given, or the fastest on documents of ``lengths``.

    The same job and documents give the same pools. Raises ``UserError`` where no choice can run.
    """
    if job.pools_decided:
        return job
    fastest: tuple[float, J] | None = None
    for pool in _sizes(job):
        tried = [(_seconds(choice, lengths), choice) for choice in _choices(job, pool)]
        best = min(tried, key=lambda one: one[0], default=None)
        if fastest is not None and (best is None or best[0] >= fastest[0]):
            break  # smaller pools still are no faster
        fastest = best or fastest
    if fastest is None:
        raise UserError(
            f"no pool of dp x cp = {job.dp * job.cp} ranks can run a global batch of {job.packing.micro_batches} "
            "context windows with the memory and the pipeline that there are; give pool and pool_micro_batches to learn "
            "why"
        )
    return fastest[1]


def _sizes(job: SimulatedJob) -> Iterator[int]:
    """All ranks, and halves of that, as long as ranks of one context-parallel group stay together."""
    if job.pool != "auto":
        yield job.pool
        return
    pool = job.dp * job.cp
    yield pool
    while pool % 2 == 0 and (pool := pool // 2) % job.cp == 0:
        yield pool


def _choices(job: J, pool: int) -> Iterator[J]:
    """The job with every number of micro-batches of a ``pool`` that could run; refusals of a number that is given."""
    options = job.packing.options
    assert isinstance(options, ElasticOptions)
    if options.pool_micro_batches != "auto":
        yield with_decided_length(job.with_pools(pool, options.pool_micro_batches))
        return
    windows = (options.global_batch or job.packing.micro_batches) * pool / (job.dp * job.cp)
    for filling in _FILLINGS:
        count = round(filling * job.pp)
        if count * _LEAST_WINDOWS > windows:
            return
        try:
            yield with_decided_length(job.with_pools(pool, count))
        except UserError:
            continue  # a pipeline that runs in rounds, or too little memory


def _seconds(job: SimulatedJob, lengths: NDArray[np.int64]) -> float:
    """What the work of a few steps takes, over that work."""
    plans = [*islice(StepPlanner(job, lengths).plans(), _STEPS)]
    work = sum(float(job.work_prices.document_seconds([s.length for s in plan.segments]).sum()) for plan in plans)
    return float(simulate_steps(plans, JobCosts(job)).seconds.sum()) / (work * job.cp)
