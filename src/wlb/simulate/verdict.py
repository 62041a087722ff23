"""What a job loses to imbalance, and how much of it each preset gives back: one answer for every command that is asked.

``wlb check``, ``compare``, ``report`` and ``simulate`` all call ``judge``, so the same job and documents have the same
figures everywhere. Every preset trains the same documents in the same layout. Steps that warm up do not count: at
first, more documents begin to wait than come back, under a preset that delays some. From then on as many wait at the
end as at the beginning, so none looks fast because its long ones still wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from wlb.documents.length_counts import DocumentLengths
from wlb.job.config import PRESETS
from wlb.job.memory.fit import fits, largest_factor
from wlb.job.memory.layers import Checkpointing
from wlb.markup import COLOURS, bar_table
from wlb.simulate.decide import decide
from wlb.simulate.job import SimulatedJob
from wlb.simulate.rate import rate
from wlb.simulate.run import SimulationResult, check_documents, simulate
from wlb.simulate.search import packed_as, usual_steps
from wlb.two_cores import on_two_cores

Lengths = NDArray[np.int64] | Sequence[NDArray[np.int64]]
Progress = Callable[[str, int], None]  # a system, and its steps just done

BASELINE, BEST, ELASTIC = "plain-4d", "best", "elastic"  # presets
AS_FAST = 0.01  # presets within so much of each other are as fast

_COMPARED = 4  # steps by which activation checkpointing is chosen

# Of ``wlb.simulate.CAUSES``: what is lost to imbalance and to what balancing takes, and the rest of a step.
PARTS = {
    "ranks that wait": ("dp ranks", "cp ranks"),
    "uneven micro-batches and bubbles": ("bubbles", "stages", "micro-batches"),
    "exchange of keys and values": ("cp exchange",),
    "other communication and optimizer": (
        "tp collectives",
        "expert exchange",
        "stage transfers",
        "weight gathers",
        "gradient reduction",
        "optimizer",
    ),
    "recomputation": ("recomputation",),
    "computing": ("compute",),
}
_LOST = tuple(PARTS)[:3]


@dataclass(frozen=True)
class Verdict:
    """Every system on the same documents in the same layout, the one that others are compared with first."""

    systems: Mapping[str, SimulationResult]
    warm_up: int  # steps before those that count

    @property
    def base(self) -> str:
        """plain-4d, or the first system where that is not among them."""
        return BASELINE if BASELINE in self.systems else next(iter(self.systems))

    @property
    def steps(self) -> int:
        """Steps that count."""
        return self.systems[self.base].steps

    def speed(self, system: str) -> float:
        """At equal work, over the base."""
        return self.systems[system].speed_at_equal_work(self.systems[self.base])

    @cached_property
    def winner(self) -> str:
        """The preset to set: the fastest that fits the memory, or ``elastic``, which delays nothing, if as fast.

        The base where none is faster by ``AS_FAST``.
        """
        others = [name for name, system in self.systems.items() if name != self.base and fits(system.job)]
        fastest = max([self.base, *others], key=self.speed)
        if self.speed(fastest) < 1 + AS_FAST:
            return self.base
        as_fast = ELASTIC in others and self.speed(ELASTIC) >= (1 - AS_FAST) * self.speed(fastest)
        return ELASTIC if as_fast else fastest

    @property
    def preset(self) -> str:
        """What to configure: the winner, or ``best`` where nothing is faster than the base."""
        return BEST if self.winner == self.base else self.winner

    def configured(self) -> SimulatedJob:
        """The job that a configuration of ``preset`` describes: before anything is decided on pools."""
        job, best = self.systems[self.preset].job, self.systems[BEST].job
        return replace(best if job.pools else job, activation_checkpointing=job.activation_checkpointing)

    def parts(self, system: str) -> dict[str, float]:
        """Where ``system`` spends its time on the work of a mean step of the base, as shares of that step.

        They add up to 1 for the base, and to 1 over the speed for others.
        """
        result, base = self.systems[system], self.systems[self.base]
        scale = base.work_rate / (result.work_seconds / result.steps)
        return {part: scale * sum(result.where[cause] for cause in causes) for part, causes in PARTS.items()}

    @property
    def lost(self) -> dict[str, float]:
        """Shares of the base's step that are lost to imbalance, its bubbles, and exchange."""
        parts = self.parts(self.base)
        return {part: parts[part] for part in _LOST}

    @property
    def given_back(self) -> float:
        """The share of the base's GPU time that the winner saves at equal work."""
        return 1 - 1 / self.speed(self.winner)

    @property
    def loses(self) -> str:
        """What the base loses, and to what, as a clause."""
        lost = self.lost
        most_first = sorted(lost.items(), key=lambda item: -item[1])
        made_of = ", ".join(f"{share:.0%} {part}" for part, share in most_first if share >= 0.005)
        together = max(0.0, sum(lost.values()))
        return f"{self.base} loses {together:.0%} of GPU time" + (f": {made_of}" if made_of else "")

    def __str__(self) -> str:
        if self.winner == self.base:
            return f"{self.loses}. No other preset is faster by {AS_FAST:.0%} or more here."
        delay = self.systems[self.winner].token_delay
        waits = "with the same documents in every step" if delay < 0.005 else f"a token waits {delay:.2f} steps"
        winner = f'preset = "{self.winner}"' if self.winner in PRESETS else f"The job {self.winner}"
        return (
            f"{self.loses}. {winner} gives back {self.given_back:.0%} "
            f"({self.speed(self.winner):.2f}x at equal work, {waits})."
        )

    def _repr_html_(self) -> str:
        parts = [self.parts(name) for name in self.systems]
        columns = {
            "system": [*self.systems],
            "lost": [f"{sum(of_system[part] for part in _LOST):.1%}" for of_system in parts],
            "speed at equal work": [f"{self.speed(name):.2f}x" for name in self.systems],
            "token delay, steps": [f"{system.token_delay:.2f}" for system in self.systems.values()],
        }
        heading = f"{self} Bars: time for the work of a step of {self.base}."
        return bar_table(heading, columns, [parts], dict(zip(PARTS, COLOURS, strict=True)))

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": str(self),
            "base": self.base,
            "lost": self.lost,
            "winner": self.winner,
            "speed_at_equal_work": self.speed(self.winner),
            "given_back": self.given_back,
            "systems": [
                {"system": name}
                | result.to_json()
                | {"speed_at_equal_work": self.speed(name), "parts": self.parts(name), "fits": fits(result.job)}
                for name, result in self.systems.items()
            ],
        }


def judge(
    jobs: Mapping[str, SimulatedJob],
    lengths: Lengths,
    steps: int | None = None,
    *,
    on_progress: Progress = lambda system, steps: None,
) -> Verdict:
    """Simulate ``steps`` steps, by default ``usual_steps``, of each of ``jobs`` on documents of ``lengths`` tokens.

    Documents are repeated where they do not fill the steps; raises ``UserError`` where they do not fill one step.
    ``on_progress`` gets the system and its steps just done.
    """
    *_, verdict = _judging(jobs, lambda job: job, lengths, steps, on_progress)
    return verdict


def judge_presets(
    job: SimulatedJob,
    lengths: Lengths,
    presets: Iterable[str] = PRESETS,
    steps: int | None = None,
    *,
    on_progress: Progress = lambda system, steps: None,
) -> Iterator[Verdict]:
    """``judge`` of ``presets_of``, with the verdict on the presets so far after each; on two cores."""
    jobs, settled = _packed(job, presets), partial(well_checkpointed, lengths=lengths)
    yield from _judging(jobs, settled, lengths, steps, on_progress, on_two_cores)


def _judging(
    jobs: Mapping[str, SimulatedJob],
    settled: Callable[[SimulatedJob], SimulatedJob],
    lengths: Lengths,
    steps: int | None,
    on_progress: Progress,
    mapped: Callable[..., Iterator[tuple[SimulationResult, bool]]] = map,
) -> Iterator[Verdict]:
    """The verdict on the systems so far, after each of ``jobs``."""
    first = next(iter(jobs.values()))
    warm_up = usual_steps(first.global_batch)
    steps, here = steps or warm_up, os.getpid()
    check_documents(first, lengths, steps)

    def simulated(name: str) -> tuple[SimulationResult, bool]:
        is_here = os.getpid() == here  # where progress can be shown
        told = partial(on_progress, name) if is_here else lambda done: None
        job, prices = settled(jobs[name]), first.work_prices
        return simulate(job, lengths, steps, warm_up=warm_up, work_prices=prices, on_progress=told), is_here

    results: dict[str, SimulationResult] = {}
    for name, (result, is_here) in zip(jobs, mapped(simulated, jobs), strict=True):
        if not is_here:
            on_progress(name, steps)
        results[name] = result
        yield Verdict(dict(results), warm_up)


def presets_of(
    job: SimulatedJob, lengths: DocumentLengths, presets: Iterable[str] = PRESETS
) -> dict[str, SimulatedJob]:
    """``job`` under each of ``presets``, with the activation checkpointing under which it is fastest.

    Without pools where documents have phases, which these do not know.
    """
    return {name: well_checkpointed(one, lengths) for name, one in _packed(job, presets).items()}


def _packed(job: SimulatedJob, presets: Iterable[str]) -> dict[str, SimulatedJob]:
    packed = {name: packed_as(job, name) for name in presets}
    return {name: one for name, one in packed.items() if not (one.phases and one.pools)}


def well_checkpointed(job: SimulatedJob, lengths: DocumentLengths) -> SimulatedJob:
    """``job`` with the cheapest checkpointing that fits; or with more, where that makes room for a larger L_max.

    L_max is the job's own, or the largest that fits if that is less; that of pools is decided with them. With full
    checkpointing and the least L_max where nothing fits.
    """
    choices: list[SimulatedJob] = []
    for kind in get_args(Checkpointing):  # cheapest first
        candidate = replace(job, activation_checkpointing=kind)
        if job.pools is not None or not job.packing.has_length_factor:
            candidate = decide(candidate, lengths)
            if fits(candidate):
                return candidate
        elif (room := largest_factor(candidate)) is not None:
            choices.append(candidate.with_length_factor(min(float(job.packing.length_factor), room)))
            if choices[-1].packing.length_factor == job.packing.length_factor:
                break
    if len(choices) > 1:
        return max(choices, key=lambda choice: rate(choice, lengths, _COMPARED, job.work_prices).work_rate)
    return choices[0] if choices else candidate.with_length_factor(candidate.least_length_factor)
