"""A policy to compare, and its best layout: the fastest, on the first step, of those that it may run in.

``RankPolicy`` plans a step from whole documents and the ranks of a stage; a policy that switches strategies, or has
several at once, makes its own ``LayoutTrial``s. What all of them train are the documents that begin in a step's global
batch, whole: none waits, none is cut.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wlb.documents.mixture import global_batches
from wlb.errors import UserError
from wlb.job.config import DataConfig
from wlb.job.memory.step import limit_of_gpu
from wlb.simulate.search import SearchSpace
from wlb.studies.policies.layouts import TRIED, candidate_ranks, layout_text, no_layout, other_capacities
from wlb.studies.policies.plan import Integers, Plan, Ranks
from wlb.studies.policies.pricing import StepPrice, price
from wlb.workload import Workload, make_workload


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


class Policy(ABC):
    """What the table compares. One that ``delays`` documents has first steps that are unlike later ones."""

    delays = False

    @abstractmethod
    def best(self, name: str, space: SearchSpace, lengths: Integers) -> Outcome:
        """Steps in its best layout. Raises ``UserError`` where none fits the memory."""


@dataclass(frozen=True)
class RankTrial:
    """``plan`` on ``ranks``; ``limit`` says what bounds its solver."""

    ranks: Ranks
    plan: Callable[[Integers, Ranks], Plan]
    limit: str = ""

    @property
    def layout(self) -> str:
        return layout_text(self.ranks) + self.limit

    def step(self, lengths: Integers) -> PricedStep:
        began = time.perf_counter()
        plan = self.plan(lengths, self.ranks)
        planning = time.perf_counter() - began
        return PricedStep(price(plan, self.ranks), plan.trained, planning)


@dataclass(frozen=True)
class RankPolicy(Policy):
    """``plan`` turns whole documents into a plan for the ranks of a stage.

    ``pipelines`` says that it runs with several stages, ``interleaves`` with several on a rank, ``keeps_weights`` is as
    in ``Ranks``. Of one that is tried in one layout only, as planning takes long, other token caps are not tried.
    ``solver_nodes`` bound each of its integer programs.
    """

    plan: Callable[[Integers, Ranks], Plan]
    pipelines: bool = True
    interleaves: bool = True
    keeps_weights: bool = False
    layouts: int = TRIED
    solver_nodes: int | None = None

    def best(self, name: str, space: SearchSpace, lengths: Integers) -> Outcome:
        batches = first_batches(lengths, space)
        choices = candidate_ranks(
            space, batches[0], pipelines=self.pipelines, interleaves=self.interleaves, keeps_weights=self.keeps_weights
        )
        limit = "" if self.solver_nodes is None else solver_limit(self.solver_nodes)
        trials = [RankTrial(ranks, self.plan, limit) for ranks in choices[: self.layouts]]
        like_it = partial(_with_other_capacities, space=space) if self.layouts > 1 else None
        return best_of(name, trials, batches, space, like_it)


def solver_limit(nodes: int) -> str:
    """What a layout says of a policy whose integer programs end after so many nodes of branch and bound."""
    return f"; integer programs of at most {nodes} nodes"


def _with_other_capacities(trial: RankTrial, space: SearchSpace) -> list[RankTrial]:
    return [replace(trial, ranks=ranks) for ranks in other_capacities(trial.ranks, space)]


def best_of(
    name: str,
    trials: Iterable[LayoutTrial],
    batches: Sequence[Integers],
    space: SearchSpace,
    like_it: Callable[[Any], Iterable[LayoutTrial]] | None = None,
) -> Outcome:
    """All steps of the trial that is fastest on the first one, of ``trials`` and of those ``like_it``.

    Raises ``UserError`` where none fits the memory.
    """
    limit = limit_of_gpu(space.hardware.memory_bytes).number_of_bytes
    priced: list[tuple[LayoutTrial, PricedStep]] = []

    def fastest() -> tuple[LayoutTrial, PricedStep]:
        fitting = [(trial, step) for trial, step in priced if step.price.memory_bytes <= limit]
        if not fitting:
            raise no_layout(name, space)
        return min(fitting, key=lambda pair: pair[1].price.seconds)

    priced += _attempted(trials, batches[0])
    if like_it is not None:
        priced += _attempted(like_it(fastest()[0]), batches[0])
    trial, step = fastest()
    steps = [step, *(trial.step(batch) for batch in batches[1:])]
    tokens = [int(step.trained.sum()) for step in steps]
    return Outcome(
        policy=name,
        layout=trial.layout,
        steps=len(steps),
        tokens=sum(tokens),
        work_seconds=sum(float(work_prices(space).document_seconds(step.trained).sum()) for step in steps),
        seconds=sum(step.price.seconds for step in steps),
        token_delay=0.0,
        tokens_cv=float(np.std(tokens) / np.mean(tokens)),
        exchanged_bytes=float(np.mean([step.price.exchanged_bytes for step in steps])),
        memory_bytes=max(step.price.memory_bytes for step in steps),
        planning_seconds=float(np.mean([step.planning_seconds for step in steps])),
        tried=len(priced),
    )


def _attempted(trials: Iterable[LayoutTrial], lengths: Integers) -> Iterator[tuple[LayoutTrial, PricedStep]]:
    """The step in every trial in which the policy finds a plan."""
    for trial in trials:
        try:
            yield trial, trial.step(lengths)
        except UserError:
            continue  # for instance a group that would need more ranks than there are


def work_prices(space: SearchSpace) -> Workload:
    """What a document's work is worth, for all policies alike: W_a + W_l of a single GPU."""
    return make_workload(space.shape, space.hardware)


def first_batches(lengths: NDArray[np.int64], space: SearchSpace) -> list[Integers]:
    """Lengths of the documents of ``space.steps`` steps, after those that warm up, as ``elastic`` packing has them.

    A step has those that begin in its global batch of the stream: in the trainer's order, epoch after epoch; longer
    ones than the window are cut as the trainer cuts them.
    """
    data = DataConfig(store="documents", context_window=space.context_window)
    batches = global_batches(lengths, data, space.micro_batches * space.context_window)
    return [*islice(batches, space.warm_up, space.warm_up + space.steps)]
