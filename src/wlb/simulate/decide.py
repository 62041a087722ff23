"""Decides what a job leaves "auto": L_max by its memory, and before that its pools by simulation.

Trainer, dry run, simulator, batches, report and rivals all call ``decide``, so that the same job runs everywhere.

Of pools, their size, micro-batches and the grouping of documents are chosen; or, without a pipeline, that ranks run
micro-batches of their own, level over a step. More micro-batches fill a pipeline better, and larger pools hold more of
a document; but small micro-batches leave a long document alone in one, and in large pools its keys and values travel
further. What is fastest depends on all of the job and on its documents. So every choice is ranked by what its steps
take at least, and the most promising one is simulated, until the best is one that was. What the memory does not hold
comes last. In a pipeline these are choices with slices; whole documents are tried in the best one's place, as they
exchange less.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store.reader import DocumentLengths
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.job.memory.fit import fits, largest_factor, too_large
from wlb.job.planner import documents_together
from wlb.packing.options import Grouping, Pools
from wlb.schedules.layout import dealt_blocks
from wlb.settings import MOST_MICRO_BATCHES
from wlb.sharding import price_shards
from wlb.simulate.costs import JobCosts
from wlb.simulate.filling import global_batches
from wlb.simulate.rate import rate
from wlb.simulate.step import Steps

_STEPS = 4  # that are simulated, the same for every choice; fewer where they are large
_SIMULATED = 128  # context windows of all these steps
_DOCUMENTS = 65_536
_WINDOWS = 256  # of a step; a larger global batch is decided on by a part of it
_FILLINGS = (1, 1.5, 2, 2.5, 3, 4, 6)  # micro-batches of a pool for each of its pipeline ranks
_SLICED_FILLINGS = (2, 3, 4, 6, 8)  # where long documents are cut
_FEWEST = (1, 1.15, 1.5)  # where so few are too large for the memory: times as many as the fewest that are not
_ONE_STEP = 0.08  # of the seconds: choices that are slower by more on one step are not simulated on others
_LEAST_WINDOWS = 0.5  # of documents in a mean micro-batch
_FEWER_BUBBLES = 0.1  # of a pipeline whose lightest micro-batches are at its ends; measured on random jobs
_FORWARD_SHARE = 0.3  # of what a micro-batch computes, a little less than a third where attention takes most of it


def decide(job: Job, lengths: DocumentLengths, *, lock_step: bool = False, least_rate: float | None = None) -> Job:
    """``job`` with nothing left "auto"; the same job and documents always give the same.

    Context-parallel groups become its pools: those given, or the fastest on documents of ``lengths``. L_max becomes the
    most that ``job.memory_limit`` allows. With ``lock_step`` the ranks of a pool cannot run micro-batches of their own,
    as in loops that know fixed context-parallel groups only. Raises ``UserError`` for pools that are given and cannot
    run, where none can, and for an L_max that is "auto" where memory does not hold one context window. Pools and an
    L_max that do not fit the memory are not refused here, unless ``least_rate`` is given: then pools that do not fit,
    or do less than so many seconds of ``job.work_prices`` in a second, count as pools that cannot run.
    """
    job = with_stages(job, lengths)
    pools = job.pools
    if pools is not None and not job.pools_decided:
        job = job.with_pools(_fastest(job, pools, lengths, lock_step, least_rate))
    decided = _with_length(job)
    if pools is None and job.packing.max_length_factor == "auto" and (problem := too_large(decided)):
        raise UserError(problem)
    return decided


def with_stages(job: Job, lengths: DocumentLengths) -> Job:
    """``job`` with its blocks dealt to pipeline stages by the seconds that they and the output head take.

    On the documents of one global batch, or the part of a large one that is decided on.
    """
    if job.layout.pp == 1 or job.layout.stage_blocks is not None or not len(lengths):
        return job
    windows = min(job.global_batch, _WINDOWS)
    documents = next(global_batches(lengths, job.data, windows * job.context_window))
    blocks, head = blocks_and_head(job, documents)
    in_blocks = round(head * job.shape.layers / blocks, 2)  # so that machines agree
    return replace(job, layout=replace(job.layout, stage_blocks=dealt_blocks(job.shape.layers, job.layout, in_blocks)))


def blocks_and_head(job: Job, documents: NDArray[np.int64]) -> tuple[float, float]:
    """Seconds that one tensor-parallel group computes ``documents`` in all blocks, and in the output head."""
    costs, again = job.costs, job.activation_checkpointing != "none"
    lengths, counts = np.unique(documents, return_counts=True)
    tokens = float(lengths @ counts)
    blocks = costs.attention_seconds(lengths) @ counts + costs.blocks_seconds(tokens)
    blocks += (2 + again) * costs.tp_seconds(tokens) + again * costs.blocks_seconds(tokens, "forward")
    return float(blocks), float(costs.head_seconds(tokens))


def _with_length(job: Job) -> Job:
    """With the largest L_max that fits, where it is "auto"; where none does, with the least."""
    if job.packing.max_length_factor != "auto":
        return job
    return job.with_length_factor(largest_factor(job) or job.least_length_factor)


def _fastest(job: Job, pools: Pools, lengths: DocumentLengths, lock_step: bool, least_rate: float | None) -> Pools:
    if pools.grouping == "level":
        if lock_step:
            raise UserError(
                "grouping = 'level' has ranks run micro-batches of their own, which this loop cannot; leave it out"
            )
        return replace(pools, size=job.layout.dp_cp)
    job.check_slices(pools)
    if pools.size != "auto" and pools.micro_batches != "auto":
        return replace(pools, grouping=_usual_grouping(job, pools))
    parts = -(-pools.global_batch // _WINDOWS)
    found = _fastest_for_part(job, pools, lengths, parts, lock_step, least_rate)
    if parts > 1 and not _holds(job.with_pools(found)):  # fewer micro-batches may hold less
        found = _fastest_for_part(job, pools, lengths, 1, lock_step, least_rate)
    return found


def _fastest_for_part(
    job: Job, pools: Pools, lengths: DocumentLengths, parts: int, lock_step: bool, least_rate: float | None
) -> Pools:
    """Decided on one of ``parts`` equal parts of the global batch."""
    part = replace(pools, global_batch=pools.global_batch // parts)
    if parts > 1 and pools.micro_batches != "auto":
        part = replace(part, micro_batches=max(1, pools.micro_batches // (parts * job.layout.pp)) * job.layout.pp)
    fastest = _PoolSearch(job, part, parts, lock_step, lengths).fastest(least_rate)
    if fastest is None:
        if pools.micro_batches != "auto":
            size = job.layout.dp_cp if pools.size == "auto" else pools.size
            job.with_pools(replace(pools, size=size))  # says why, where it is refused for its size
        raise UserError(
            f"no pool of dp x cp = {job.layout.dp_cp} ranks can run a global batch of {pools.global_batch} "
            "context windows in this pipeline; give pool and pool_micro_batches to learn why"
        )
    micro_batches = pools.micro_batches
    if micro_batches == "auto" and fastest.grouping != "level":
        micro_batches = fastest.micro_batches * parts
        if parts > 1:  # a pipeline may run in rounds
            micro_batches = -(-micro_batches // job.layout.pp) * job.layout.pp
    return replace(pools, size=fastest.size, micro_batches=micro_batches, grouping=fastest.grouping)


class _PricedPools(NamedTuple):
    """Pools, and their seconds for a second of work: as simulated, or at least. The first in order is the best."""

    too_large: bool  # for the memory
    no_room: bool  # for some document, which has to wait though none should
    seconds: float
    steps: int  # that were simulated
    size: int
    micro_batches: int  # of a pool; 0 where ranks run their own
    grouping: Grouping
    job: Job  # no two choices are alike in all that comes before it


@dataclass(frozen=True)
class _PoolSearch:
    """The fastest of all ``pools`` that ``job`` could have, for one of ``parts`` equal parts of its global batch."""

    job: Job
    pools: Pools
    parts: int
    lock_step: bool
    lengths: DocumentLengths
    with_length: dict[tuple[int, int], Job] = field(default_factory=dict)  # of choices that were simulated

    def fastest(self, least_rate: float | None) -> _PricedPools | None:
        """None where no pools can run; with a ``least_rate``, none that fit the memory and are as fast."""
        most_seconds = 1 / least_rate if least_rate else math.inf
        choices = [choice for choice in self._choices() if least_rate is None or not choice.too_large]
        heapify(choices)
        while choices and choices[0].steps < self._steps and choices[0].seconds <= most_seconds:
            heapreplace(choices, self._simulated(choices[0]))
        if not choices or choices[0].seconds > most_seconds:
            return None
        found = choices[0]
        if self.pools.grouping == "auto" and found.grouping == "slices":
            found = min(found, self._simulated(found._replace(grouping="even")))
        return found

    def _choices(self) -> Iterator[_PricedPools]:
        """Every size, number of micro-batches and grouping, none of them simulated."""
        wanted, layout, grouping = self.pools.grouping, self.job.layout, _usual_grouping(self.job, self.pools)
        sizes = [layout.cp * groups for groups in range(1, layout.dp + 1) if layout.dp % groups == 0]
        if self.pools.size != "auto":
            sizes = [self.pools.size]
        bounds: dict[int, float] = {}
        for size in sizes:
            for large, job in self._with_counts(size):
                filled = self._least_filled(job)
                if filled not in bounds:
                    bounds[filled] = self._least_seconds(filled)
                yield _PricedPools(large, False, bounds[filled], 0, size, job.micro_batches_per_rank, grouping, job)
        free = (wanted, self.pools.micro_batches) == ("auto", "auto") and not self.lock_step
        if free and layout.pp == 1 and layout.dp_cp in sizes:
            job = self.job.with_pools(replace(self.pools, grouping="level"))
            yield _PricedPools(not _holds(job), False, 0.0, 0, layout.dp_cp, 0, "level", job)

    def _with_counts(self, size: int) -> list[tuple[bool, Job]]:
        """With pools of this size and numbers of micro-batches; more where the memory holds none of the usual ones."""
        if self.pools.micro_batches != "auto":
            return self._that_run(size, [self.pools.micro_batches])
        pp, dp_cp = self.job.layout.pp, self.job.layout.dp_cp
        most = int(min(self.pools.global_batch / _LEAST_WINDOWS, MOST_MICRO_BATCHES / self.parts) * size / dp_cp)
        slices = _usual_grouping(self.job, self.pools) == "slices"
        counts = [round(filling * pp) for filling in (_SLICED_FILLINGS if slices else _FILLINGS)]
        counts = [count for count in counts if count <= most] or counts[:1]
        usual = self._that_run(size, counts)
        more = range(-(-counts[-1] // pp) * pp, most + 1, pp)
        if not more or not all(large for large, _ in usual):
            return usual

        def holds(count: int) -> bool:
            return any(not large for large, _ in self._that_run(size, [count]))

        fewest = more[bisect_left(more[:-1], True, key=holds)]
        return self._that_run(size, [min(more[-1], math.ceil(times * fewest / pp) * pp) for times in _FEWEST])

    def _that_run(self, size: int, counts: Iterable[int]) -> list[tuple[bool, Job]]:
        """Jobs with so many micro-batches, and before each whether it is too large for the memory."""
        jobs, pools = [], replace(self.pools, size=size, grouping=_usual_grouping(self.job, self.pools))
        for count in sorted(set(counts)):
            with suppress(UserError):  # a pipeline that runs in rounds, or an L_max without room for so much
                jobs.append(self.job.with_pools(replace(pools, micro_batches=count)))
        return [(not _holds(job), job) for job in jobs]

    @cached_property
    def _steps(self) -> int:
        documents = documents_together(self.job, self.lengths)
        return max(1, min(_STEPS, _SIMULATED // self.pools.global_batch, _DOCUMENTS // max(1, documents)))

    @cached_property
    def _documents(self) -> NDArray[np.int64]:
        """Tokens of the documents of all steps."""
        batches = global_batches(self.lengths, self.job.data, self.pools.global_batch * self.job.context_window)
        return np.concatenate([*islice(batches, self._steps)])

    def _least_filled(self, job: Job) -> int:
        """Micro-batches of a pool that are not empty, if each holds as many tokens as the longest document."""
        tokens, longest = float(self._documents.sum()), float(self._documents.max())
        rounds = math.ceil(tokens / longest / (self._steps * job.layout.dp * job.layout.pp))
        return min(job.micro_batches_per_rank, rounds * job.layout.pp)

    def _least_seconds(self, micro_batches: int) -> float:
        """For a second of work, if ranks share it evenly in so many ``micro_batches`` and exchange nothing."""
        layout, documents = self.job.layout, self._documents
        alone = price_shards([documents.tolist()], 1, self.job.sharding.strategy, self.job.costs)
        shares = self._steps * layout.dp_cp * micro_batches
        forward, backward = alone.attention_forward / shares, alone.attention_backward / shares
        share = alone._replace(tokens=alone.tokens // shares, attention_forward=forward, attention_backward=backward)
        everywhere = share.map(lambda column: np.repeat(column, micro_batches, axis=0))  # all ranks are alike
        steps = Steps.of_shards(everywhere.reshaped(1, 1, micro_batches), JobCosts(self.job))
        filling = (layout.pp - 1) / (layout.virtual_pp * micro_batches)  # and emptying, to what is computed
        if self.job.plans_operations:  # where the weights' part of backwards leaves the pipeline nothing to empty
            filling *= _FORWARD_SHARE if self.job.splits_backward else 1.0
            steps = replace(steps, modelled=steps.modelled - {"bubbles"})
        seconds = float(steps.seconds[0]) * (1 + filling * self.job.plans_operations)
        work = float(self.job.work_prices.document_seconds(documents).sum())
        return (1 - _FEWER_BUBBLES * filling / (1 + filling)) * seconds * self._steps / work

    def _simulated(self, choice: _PricedPools) -> _PricedPools:
        """With the seconds of one step, as much less as others may show; or of all, if it has those of one."""
        key, steps = (choice.size, choice.micro_batches), self._steps if choice.steps else 1
        if key not in self.with_length:
            self.with_length[key] = _with_length(choice.job)
        job = self.with_length[key]
        job = replace(job, packing=job.packing.changed(grouping=choice.grouping))
        rated = rate(job, self.lengths, steps, self.job.work_prices)
        no_room = not self.pools.delays and sum(rated.step_tokens) < steps * job.global_batch * job.context_window
        seconds = 1 / rated.work_rate * (1.0 if steps == self._steps else 1 - _ONE_STEP)
        return choice._replace(no_room=no_room and steps == self._steps, seconds=seconds, steps=steps)


def _usual_grouping(job: Job, pools: Pools) -> Grouping:
    """That of ``pools`` or, where it is not given, of ranks that run equally many micro-batches."""
    may_slice = job.plans_operations and job.phases is None
    return pools.grouping if pools.grouping != "auto" else "slices" if may_slice else "even"


def _holds(job: Job) -> bool:
    """Whether the memory holds micro-batches of its L_max or, where that is "auto", of the least that it could be."""
    return fits(job if job.packing.max_length_factor != "auto" else job.with_length_factor(job.least_length_factor))
