"""Systems that the simulator runs as they are: plain-4D, fixed-4D, WLB-LLM, best and elastic.

Their steps come from the trainer's planner and are priced by ``wlb.simulate.simulate``, unchanged. Layouts are those of
``wlb simulate --search``; of the most promising ones the fastest under fixed-4D are tried with every system.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.memory.layers import Checkpointing
from wlb.planning.memory import fits, predicted_memory
from wlb.planning.planner import StepPlanner
from wlb.rivals.exchange import kv_bytes
from wlb.rivals.plan import Ranks
from wlb.rivals.policy import Outcome, first_batches
from wlb.rivals.pricing import ideal_seconds
from wlb.simulate.costs import JobCosts
from wlb.simulate.job import SimulatedJob, preset_sections, with_decided_length
from wlb.simulate.run import SimulationResult, simulate
from wlb.simulate.search import SearchSpace, fitted, layout_of, layouts, packed_as
from wlb.simulate.shards import price_shards
from wlb.simulate.step import Steps
from wlb.workload.base import DocumentPrices

_SCREENED = 16  # layouts of which one step is simulated under fixed-4d
_TRIED = 4  # of them under every system, and as many of the most promising
_POOLS = (1, 2, 4)  # of elastic packing: parts of a stage's ranks, which make pools
_PER_WINDOW = (0.25, 0.5, 0.75, 1.0)  # micro-batches of a pool for each context window that it trains
_SCREEN = "fixed-4d"
# Steps for one that is asked for, of systems in which documents wait: at first long ones wait for others as dear,
# and steps do less work than later ones.
_LONGER = 4


@dataclass(frozen=True)
class SystemPolicy:
    """One of the presets of ``wlb.config.PRESETS``."""

    preset: str
    source: str
    assumed: str = ""
    delays: bool = False  # documents, so that its first steps are unlike later ones

    def best(self, name: str, space: SearchSpace, lengths: NDArray[np.int64], work_prices: DocumentPrices) -> Outcome:
        screened = _screened(space, lengths.tobytes())
        jobs = _pooled_jobs(space, screened) if self.preset == "elastic" else _packed_jobs(self.preset, screened)
        if not jobs:
            raise UserError(f"{name} finds no layout of {space.gpus} GPUs that fits their memory; give more GPUs")
        longer = _LONGER if self.delays else 1
        job = max(jobs, key=lambda job: _work_rate(job, lengths, longer, work_prices))
        result = simulate(job, lengths, longer * space.steps, work_prices=work_prices)
        return _outcome(name, result, lengths, len(jobs))


def _packed_jobs(preset: str, screened: Sequence[SimulatedJob]) -> list[SimulatedJob]:
    packed = (packed_as(job, preset).with_length_factor(float(job.packing.length_factor)) for job in screened)
    return [job for job in map(fitted, packed) if job is not None]


def _pooled_jobs(space: SearchSpace, screened: Sequence[SimulatedJob]) -> list[SimulatedJob]:
    """Elastic pools of several sizes and numbers of micro-batches in the layouts of ``screened``, where they fit."""
    packing, sharding = preset_sections("elastic", {"micro_batches": space.micro_batches})
    distinct = {(job.tp, job.pp, job.virtual_pp): job for job in reversed(screened)}
    fitting = []
    for job in distinct.values():
        ranks = job.dp * job.cp
        for size in (ranks // part for part in _POOLS if ranks % part == 0):
            windows = space.micro_batches * size / ranks
            for micro_batches in sorted({max(job.pp, round(windows * share)) for share in _PER_WINDOW}):
                pooled = replace(job, packing=packing, sharding=sharding)
                fitting += _with_pools_that_fit(pooled, size, micro_batches)
    return fitting


def _with_pools_that_fit(job: SimulatedJob, size: int, micro_batches: int) -> list[SimulatedJob]:
    """``job`` with these pools and the cheapest activation checkpointing under which it fits, or nothing."""
    for kind in get_args(Checkpointing):  # cheapest first
        try:
            pooled = replace(job, activation_checkpointing=kind).with_pools(size, micro_batches)
        except UserError:
            return []  # a pipeline that runs in rounds
        pooled = with_decided_length(pooled)
        if fits(pooled, pooled.memory_limit):
            return [pooled]
    return []


@lru_cache(maxsize=2)
def _screened(space: SearchSpace, lengths_bytes: bytes) -> tuple[SimulatedJob, ...]:
    """The layouts fastest for a step of fixed-4D, and the most promising. Raises ``UserError`` where none fits."""
    lengths = np.frombuffer(lengths_bytes, np.int64)
    fitting, _ = layouts(space)
    if not fitting:
        raise UserError(
            f"no layout of {space.gpus} GPUs fits windows of {space.context_window} tokens; give more GPUs or a "
            "shorter window"
        )
    documents = first_batches(lengths, replace(space, steps=1))[0]
    fitting.sort(key=lambda job: ideal_seconds(documents, _as_ranks(job)))
    promising = fitting[:_SCREENED]
    work_prices = promising[0].work_prices
    rates = {id(job): _work_rate(packed_as(job, _SCREEN), lengths, 1, work_prices) for job in promising}
    fastest = sorted(promising, key=lambda job: -rates[id(job)])
    return tuple(dict.fromkeys(fastest[:_TRIED] + promising[:_TRIED]))


def _as_ranks(job: SimulatedJob) -> Ranks:
    ranks = job.dp * job.cp
    packing = packed_as(job, _SCREEN).packing.model_copy(update={"micro_batches": ranks * job.pp})
    return Ranks(replace(job, cp=1, dp=ranks, packing=packing), -(-job.context_window // job.cp))


def _work_rate(job: SimulatedJob, lengths: NDArray[np.int64], steps: int, work_prices: DocumentPrices) -> float:
    plans = [*islice(StepPlanner(job, lengths).plans(), steps)]
    work = sum(float(work_prices.document_seconds(plan.table[:, 2]).sum()) for plan in plans)
    return work / float(Steps.of(plans, JobCosts(job)).seconds.sum())


def _outcome(name: str, result: SimulationResult, lengths: NDArray[np.int64], tried: int) -> Outcome:
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
        layout=f"{layout_of(job)}, {job.activation_checkpointing}",
        steps=steps,
        tokens=result.tokens,
        work_seconds=result.work_seconds,
        seconds=result.seconds,
        token_delay=result.token_delay,
        tokens_cv=result.tokens_cv,
        exchanged_bytes=received * kv_bytes(job) * job.shape.layers / (job.dp * job.cp * job.pp),
        memory_bytes=predicted_memory(job).total,
        planning_seconds=planning / steps,
        tried=tried,
    )
