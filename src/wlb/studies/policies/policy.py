"""A policy to compare: its name, where it is from, what had to be assumed, and the layouts in which it may run.

``RankPolicy`` plans a step from whole documents and the ranks of a stage; a policy that switches strategies, or has
several at once, makes its own ``LayoutTrial``s. What all of them train are the documents that begin in a step's global
batch, whole: none waits, none is cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wlb.documents.order import DocumentStream
from wlb.errors import UserError
from wlb.job.config import DataConfig
from wlb.job.memory.step import limit_of_gpu
from wlb.simulate.search import SearchSpace
from wlb.studies.policies.layouts import TRIED, candidate_ranks, layout_text, no_layout, other_capacities
from wlb.studies.policies.plan import GroupPlan, Integers, MovedPlan, Ranks
from wlb.studies.policies.pricing import StepPrice
from wlb.workload.base import DocumentPrices

Plan = GroupPlan | MovedPlan
_DOCUMENTS_AT_ONCE = 64


@dataclass(frozen=True)
class PricedStep:
    """A step's price, lengths of the documents that it trains, and the seconds that planning it took here."""

    price: StepPrice
    trained: Integers
    planning_seconds: float


class LayoutTrial(Protocol):
    """A policy in one layout."""

    @property
    def layout(self) -> str: ...

    def step(self, lengths: Integers) -> PricedStep: ...


@dataclass(frozen=True)
class Outcome:
    """What some steps of a policy come to, in its best layout. Seconds are simulated but for planning's, measured here.

    ``exchanged_bytes`` are those of context parallelism, and of weights and gradients that change places, which the
    mean GPU receives in a step. ``tried`` counts the layouts that were priced.
    """

    policy: str
    layout: str
    steps: int
    tokens: int
    work_seconds: float
    seconds: float
    token_delay: float
    tokens_cv: float
    exchanged_bytes: float
    memory_bytes: float
    planning_seconds: float
    tried: int

    @property
    def work_rate(self) -> float:
        """Seconds of work done in a second."""
        return self.work_seconds / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_json(self, base: Outcome) -> dict[str, Any]:
        return vars(self) | {
            "tokens_per_second": self.tokens_per_second,
            "speed_at_equal_work": self.work_rate / base.work_rate,
        }


class Policy(Protocol):
    """What the table compares."""

    @property
    def source(self) -> str: ...

    @property
    def assumed(self) -> str: ...

    def best(
        self, name: str, space: SearchSpace, lengths: NDArray[np.int64], work_prices: DocumentPrices
    ) -> Outcome: ...


@dataclass(frozen=True)
class RankTrial:
    """``plan`` on ``ranks``."""

    ranks: Ranks
    plan: Callable[[Integers, Ranks], Any]
    price: Callable[[Any, Ranks], StepPrice]

    @property
    def layout(self) -> str:
        return layout_text(self.ranks)

    def step(self, lengths: Integers) -> PricedStep:
        began = time.perf_counter()
        plan: Plan = self.plan(lengths, self.ranks)
        planning = time.perf_counter() - began
        return PricedStep(self.price(plan, self.ranks), plan.trained, planning)


@dataclass(frozen=True)
class RankPolicy:
    """``plan`` turns whole documents into a plan for the ranks of a stage, and ``price`` prices that.

    ``pipelines`` says that it runs with several stages, ``interleaves`` with several on a rank, ``keeps_weights`` is as
    in ``Ranks``.
    """

    source: str
    assumed: str
    plan: Callable[[Integers, Ranks], Any]
    price: Callable[[Any, Ranks], StepPrice]
    pipelines: bool = True
    interleaves: bool = True
    keeps_weights: bool = False
    layouts: int = TRIED  # that are tried; of one, no other token caps are, as planning takes long

    def best(self, name: str, space: SearchSpace, lengths: NDArray[np.int64], work_prices: DocumentPrices) -> Outcome:
        batches = first_batches(lengths, space)
        choices = candidate_ranks(
            space, batches[0], pipelines=self.pipelines, interleaves=self.interleaves, keeps_weights=self.keeps_weights
        )
        trials = [RankTrial(ranks, self.plan, self.price) for ranks in choices[: self.layouts]]
        more = self._other_capacities(space) if self.layouts > 1 else lambda fastest: []
        return best_of(name, trials, batches, space, work_prices, more=more)

    def _other_capacities(self, space: SearchSpace) -> Callable[[LayoutTrial], list[LayoutTrial]]:
        def more(trial: LayoutTrial) -> list[LayoutTrial]:
            assert isinstance(trial, RankTrial)
            return [replace(trial, ranks=ranks) for ranks in other_capacities(trial.ranks, space)]

        return more


def best_of(
    name: str,
    trials: Sequence[LayoutTrial],
    batches: Sequence[Integers],
    space: SearchSpace,
    work_prices: DocumentPrices,
    *,
    more: Callable[[LayoutTrial], Sequence[LayoutTrial]] = lambda fastest: (),
) -> Outcome:
    """The trial that is fastest on the first step, of ``trials`` and of ``more`` like the fastest of them; all steps.

    Raises ``UserError`` where none fits the memory.
    """
    limit = memory_limit(space)
    priced: list[tuple[LayoutTrial, PricedStep]] = []

    def fastest() -> tuple[LayoutTrial, PricedStep]:
        fitting = [(trial, step) for trial, step in priced if step.price.memory_bytes <= limit]
        if not fitting:
            raise no_layout(name, space)
        return min(fitting, key=lambda pair: pair[1].price.seconds)

    priced += _attempted(trials, batches[0])
    priced += _attempted(more(fastest()[0]), batches[0])
    trial, step = fastest()
    steps = [step, *(trial.step(batch) for batch in batches[1:])]
    return _outcome(name, trial, steps, work_prices, len(priced))


def _attempted(trials: Sequence[LayoutTrial], lengths: Integers) -> list[tuple[LayoutTrial, PricedStep]]:
    """The step in every trial in which the policy finds a plan."""
    priced = []
    for trial in trials:
        try:
            priced.append((trial, trial.step(lengths)))
        except UserError:
            continue  # for instance a group that would need more ranks than there are
    return priced


def _outcome(
    name: str, trial: LayoutTrial, steps: Sequence[PricedStep], work_prices: DocumentPrices, tried: int
) -> Outcome:
    tokens = [int(step.trained.sum()) for step in steps]
    return Outcome(
        policy=name,
        layout=trial.layout,
        steps=len(steps),
        tokens=sum(tokens),
        work_seconds=sum(float(work_prices.document_seconds(step.trained).sum()) for step in steps),
        seconds=sum(step.price.seconds for step in steps),
        token_delay=0.0,
        tokens_cv=float(np.std(tokens) / np.mean(tokens)),
        exchanged_bytes=float(np.mean([step.price.exchanged_bytes for step in steps])),
        memory_bytes=max(step.price.memory_bytes for step in steps),
        planning_seconds=float(np.mean([step.planning_seconds for step in steps])),
        tried=tried,
    )


def memory_limit(space: SearchSpace) -> float:
    """Bytes that a process may hold on one of the GPUs."""
    return limit_of_gpu(space.hardware.memory_bytes).number_of_bytes


def first_batches(lengths: NDArray[np.int64], space: SearchSpace) -> list[Integers]:
    """Lengths of the documents of the first ``space.steps`` steps."""
    batches = global_batches(lengths, DataConfig(store="documents", context_window=space.context_window), space)
    return [next(batches) for _ in range(space.steps)]


def global_batches(lengths: NDArray[np.int64], data: DataConfig, space: SearchSpace) -> Iterator[Integers]:
    """Documents of every step, as ``elastic`` packing has it: those that begin in its global batch of the stream.

    In the trainer's order, epoch after epoch; longer ones than the window are cut as the trainer cuts them.
    """
    stream = DocumentStream(lengths, data)
    size = space.micro_batches * space.context_window
    taken, due = 0, size
    batch: list[int] = []
    while True:
        if stream.epoch_is_over:
            stream.next_epoch()
        for segment in stream.take(_DOCUMENTS_AT_ONCE):
            if taken >= due:
                yield np.array(batch, np.int64)
                batch, due = [], due + size
            batch.append(segment.length)
            taken += segment.length
