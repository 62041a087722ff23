"""Systems that the simulator runs as they are: plain-4D, fixed-4D, WLB-LLM, best and elastic.

Their steps come from the trainer's planner and are priced as those of ``wlb.simulate.simulate``. Layouts of the first
four are those of ``wlb simulate --search``; of the most promising ones the fastest under fixed-4D are tried with every
system. Elastic runs in these, and in the layouts that policies without fixed groups choose from, each with the pools,
micro-batches and L_max that the trainer decides on there; in the fastest one every kind of activation checkpointing is
tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import get_args

import numpy as np

from wlb.errors import UserError
from wlb.job.memory.fit import fits, predicted_memory
from wlb.job.memory.layers import Checkpointing
from wlb.schedules.layout import Layout
from wlb.simulate.decide import decide
from wlb.simulate.job import SimulatedJob, preset_sections
from wlb.simulate.rate import Rate, first_steps, rate
from wlb.simulate.search import SearchSpace, fitted, layout_of, layouts, packed_as
from wlb.studies.policies.layouts import candidate_ranks, no_layout
from wlb.studies.policies.plan import Integers, Ranks
from wlb.studies.policies.policy import Outcome, Policy, first_batches, work_prices
from wlb.studies.policies.pricing import ideal_seconds, received_bytes

_SCREENED = 16  # layouts of which one step is simulated under fixed-4d
_TRIED = 4  # of them under every system, and as many of the most promising
_SCREEN = "fixed-4d"
LONGER = 4  # steps for one that is asked for, of systems in which documents wait: it matters which wait at the end


Mapped = Callable[..., Iterator[float]]


@dataclass(frozen=True)
class SystemPolicy(Policy):
    """One of the presets of ``wlb.job.config.PRESETS``."""

    preset: str
    delays: bool = False

    def best(self, name: str, space: SearchSpace, lengths: Integers) -> Outcome:
        job, tried = self.fastest(name, space, lengths)
        layout = f"{layout_of(job)}, {job.activation_checkpointing}"
        return _simulated(name, job, layout, tried, self._longer * space.steps, space, lengths)

    def fastest(
        self, name: str, space: SearchSpace, lengths: Integers, mapped: Mapped = map
    ) -> tuple[SimulatedJob, int]:
        """The job of the best layout, and how many were tried; ``mapped`` as ``on_two_cores``."""
        screened = _screened(space, lengths.tobytes(), mapped)
        packed = (packed_as(job, self.preset).with_length_factor(float(job.packing.length_factor)) for job in screened)
        jobs = [job for job in map(fitted, packed) if job is not None]
        if not jobs:
            raise no_layout(name, space)
        prices = work_prices(space)
        rates = [*mapped(lambda job: rate(job, lengths, self._longer, prices).work_rate, jobs)]
        return jobs[int(np.argmax(rates))], len(jobs)

    @property
    def _longer(self) -> int:
        return LONGER if self.delays else 1


@lru_cache(maxsize=2)
def _screened(space: SearchSpace, lengths_bytes: bytes, mapped: Mapped) -> tuple[SimulatedJob, ...]:
    """The layouts fastest for a step of fixed-4D, and the most promising. Raises ``UserError`` where none fits."""
    lengths = np.frombuffer(lengths_bytes, np.int64)
    fitting, _ = layouts(space)
    if not fitting:
        raise no_layout(_SCREEN, space)
    documents = first_batches(lengths, replace(space, steps=1))[0]
    ideals = [*mapped(lambda job: ideal_seconds(documents, _as_ranks(job)), fitting)]
    promising = [fitting[place] for place in np.argsort(ideals, kind="stable")[:_SCREENED]]
    prices = promising[0].work_prices
    rates = [*mapped(lambda job: rate(packed_as(job, _SCREEN), lengths, 1, prices).work_rate, promising)]
    fastest = [promising[place] for place in np.argsort(-np.array(rates), kind="stable")]
    return tuple(dict.fromkeys(fastest[:_TRIED] + promising[:_TRIED]))


def _as_ranks(job: SimulatedJob) -> Ranks:
    ranks = job.layout.dp * job.layout.cp
    packing = packed_as(job, _SCREEN).packing.changed(micro_batches=ranks * job.layout.pp)
    return Ranks(replace(job, packing=packing).with_layout(cp=1, dp=ranks), -(-job.context_window // job.layout.cp))


class ElasticPolicy(Policy):
    """The preset ``elastic``."""

    def best(self, name: str, space: SearchSpace, lengths: Integers) -> Outcome:
        job, tried = self.fastest(name, space, lengths)
        stages = f" x {job.layout.virtual_pp} stages" if job.layout.virtual_pp > 1 else ""
        layout = f"tp {job.layout.tp} pp {job.layout.pp}{stages}, {_pools_of(job)}, {job.activation_checkpointing}"
        return _simulated(name, job, layout, tried, space.steps, space, lengths)

    def fastest(self, name: str, space: SearchSpace, lengths: Integers) -> tuple[SimulatedJob, int]:
        """The job of the best layout, and how many were tried."""
        documents = first_batches(lengths, replace(space, steps=1))[0]
        prices = work_prices(space)
        tried: dict[tuple[Layout, Checkpointing], bool] = {}
        found: list[tuple[float, SimulatedJob, SimulatedJob]] = []

        def attempt(layout: SimulatedJob, kind: Checkpointing) -> bool:
            """Whether it fits the memory, and holds all documents of its first step."""
            key = layout.layout, kind
            if key not in tried:
                tried[key] = False
                with suppress(UserError):  # no pool can run the global batch in this pipeline
                    job = decided_in(replace(layout, activation_checkpointing=kind), space, lengths)
                    rated = rate(job, lengths, 1, prices) if fits(job) else None
                    if rated and rated.step_tokens[0] >= job.global_batch * job.context_window:
                        tried[key] = True
                        found.append((rated.work_rate, job, layout))
            return tried[key]

        for keeps_weights in (False, True):
            with suppress(UserError):  # nothing fits so
                for ranks in candidate_ranks(
                    space, documents, pipelines=True, interleaves=True, keeps_weights=keeps_weights
                ):
                    attempt(ranks.job, ranks.job.activation_checkpointing)
        with suppress(UserError):
            for job in _screened(space, lengths.tobytes(), map):
                any(attempt(_as_ranks(job).job, kind) for kind in get_args(Checkpointing))  # cheapest that fits
        if not found:
            raise no_layout(name, space)
        for kind in get_args(Checkpointing):
            attempt(max(found, key=itemgetter(0))[2], kind)
        return max(found, key=itemgetter(0))[1], len(tried)


def _pools_of(job: SimulatedJob) -> str:
    if job.levels_steps:
        return f"{job.layout.cp} ranks, level steps"
    grouping = job.pools.grouping if job.pools else "even"
    number = f"{job.layout.dp} pool{'s' if job.layout.dp > 1 else ''} of {job.layout.cp} ranks"
    return f"{number}, {job.micro_batches_per_rank} micro-batches, {grouping}"


def decided_in(layout: SimulatedJob, space: SearchSpace, lengths: Integers, grouping: str = "auto") -> SimulatedJob:
    """What the trainer runs where dp ranks of ``layout`` train a global batch of ``space`` in pools.

    Raises ``UserError`` where it cannot.
    """
    options = {"micro_batches": layout.layout.dp, "global_batch": space.micro_batches, "grouping": grouping}
    packing, sharding = preset_sections("elastic", options)
    return decide(replace(layout, packing=packing, sharding=sharding), lengths)


def _simulated(
    name: str, job: SimulatedJob, layout: str, tried: int, steps: int, space: SearchSpace, lengths: Integers
) -> Outcome:
    """Steps of ``job``; planning, sharding included, is measured here."""
    rated, exchanged, delayed = Rate(work_prices(space)), 0.0, 0
    priced_steps = first_steps(job, lengths, steps, space.warm_up)
    began = time.perf_counter()
    for plans, priced in priced_steps:
        rated.add(plans, priced)
        exchanged += sum(received_bytes(alike.shards, job) for alike in priced.of_sizes)
        delayed += sum(plan.delay_token_steps for plan in plans)
    planning = time.perf_counter() - began
    tokens = rated.step_tokens
    return Outcome(
        policy=name,
        layout=layout,
        steps=steps,
        tokens=sum(tokens),
        work_seconds=rated.work_seconds,
        seconds=rated.seconds,
        token_delay=delayed / sum(tokens),
        tokens_cv=float(np.std(tokens) / np.mean(tokens)),
        exchanged_bytes=exchanged / steps / (job.layout.dp * job.layout.cp * job.layout.pp),
        memory_bytes=predicted_memory(job).total,
        planning_seconds=planning / steps,
        tried=tried,
    )
