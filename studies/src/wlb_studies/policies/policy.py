"""A policy to compare, and its best layout: the one that is fastest on the first step of each draw.

``RankPolicy`` plans a step from whole documents and the ranks of a stage. A policy that switches strategies, or runs
several at once, makes its own ``LayoutTrial``s. All policies train the documents that begin in a step's global batch,
whole and without delay. Draws of the documents and steps per draw are the same as in ``wlb check``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from wlb.errors import UserError
from wlb.job.config import DataConfig
from wlb.job.job import limit_of_gpu
from wlb.schedules.layout import Weights
from wlb.simulate.filling import global_batches
from wlb.simulate.search import DRAWS
from wlb.simulate.space import SearchSpace
from wlb.simulate.verdict import usual_steps
from wlb_studies.policies.layouts import HANDLINGS, candidate_ranks, layout_text, no_layout, other_capacities
from wlb_studies.policies.plan import Integers, Plan, Ranks
from wlb_studies.policies.pricing import StepPrice, price

_NEAR = 0.03  # of the fastest in the first draw: other draws may change the order within it
_seconds = attrgetter("seconds")


@dataclass(frozen=True)
class PricedStep:
    """A step's price, lengths of its documents, and the CPU seconds that planning took on this machine."""

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
    """Results of a policy in its best layout. Seconds are simulated, except planning seconds, which are measured here.

    Each draw has ``steps`` steps, and trains ``draw_tokens`` in ``draw_seconds``; ``draw_work`` is the work in it,
    W_a + W_l, in seconds. ``attention_kept`` is below 1 if cutting documents drops attention. ``exchanged_bytes`` is
    what the mean GPU receives in a step for context parallelism and for weights and gradients that move. ``tried``
    counts the layouts that fit.
    """

    policy: str
    layout: str
    steps: int
    draw_tokens: Sequence[int]
    draw_seconds: Sequence[float]
    draw_work: Sequence[float]
    token_delay: float
    tokens_cv: float
    exchanged_bytes: float
    memory_bytes: float
    planning_seconds: float
    tried: int
    attention_kept: float = 1.0

    @property
    def tokens_per_second(self) -> float:
        return sum(self.draw_tokens) / sum(self.draw_seconds)

    def speedup(self, base: Outcome) -> float:
        """Tokens per second over those of ``base``, of all draws together, as in ``wlb.simulate.verdict``."""
        return self.tokens_per_second / base.tokens_per_second

    def spread(self, base: Outcome) -> tuple[float, float]:
        """The lowest and the highest speedup of a draw."""
        mine, its = (np.divide(one.draw_tokens, one.draw_seconds) for one in (self, base))
        speedups = [*(mine / its).tolist(), self.speedup(base)]
        return min(speedups), max(speedups)

    def speed_at_equal_work(self, base: Outcome) -> float:
        """Work done per second over that of ``base``, which skips attention where it cuts documents."""
        mine, its = (sum(one.draw_work) / sum(one.draw_seconds) for one in (self, base))
        return mine / its

    def to_json(self, base: Outcome) -> dict[str, Any]:
        return vars(self) | {
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.speedup(base),
            "spread": self.spread(base),
            "speed_at_equal_work": self.speed_at_equal_work(base),
        }


class Policy(ABC):
    """What the table compares."""

    @abstractmethod
    def best(self, name: str, space: SearchSpace, lengths: Integers, steps: int | None = None) -> Outcome:
        """Run ``steps`` steps of each draw, by default ``usual_steps``, in the best layout.

        Raises ``UserError`` where none fits the memory.
        """


@dataclass(frozen=True)
class RankTrial:
    """``plan`` on ``ranks``; ``limit`` says what bounds its solver, for the table."""

    ranks: Ranks
    plan: Callable[[Integers, Ranks], Plan]
    limit: str = ""

    @property
    def layout(self) -> str:
        return layout_text(self.ranks) + self.limit

    def step(self, lengths: Integers) -> PricedStep:
        began = time.process_time()
        plan = self.plan(lengths, self.ranks)
        planning = time.process_time() - began
        return PricedStep(price(plan, self.ranks), plan.trained, planning)


@dataclass(frozen=True)
class RankPolicy(Policy):
    """``plan`` turns whole documents into a plan for the ranks of a stage.

    With ``pipelines`` it may run several stages, with ``interleaves`` several per rank. Without a pipeline each of
    ``handlings`` of weights is tried. If planning takes so long that only one layout is tried, so is only one
    token cap. ``solver_nodes`` bounds each integer program.
    """

    plan: Callable[[Integers, Ranks], Plan]
    pipelines: bool = True
    interleaves: bool = True
    handlings: tuple[Weights, ...] = HANDLINGS
    layouts: int | None = None
    solver_nodes: int | None = None

    def best(self, name: str, space: SearchSpace, lengths: Integers, steps: int | None = None) -> Outcome:
        draws = batches_of_draws(lengths, space, steps)
        choices = candidate_ranks(
            space, draws[0][0], pipelines=self.pipelines, interleaves=self.interleaves, handlings=self.handlings
        )
        limit = "" if self.solver_nodes is None else solver_limit(self.solver_nodes)
        trials = (RankTrial(ranks, self.plan, limit) for ranks in choices)
        like_it = None if self.layouts == 1 else partial(_with_other_capacities, space=space)
        return best_of(name, trials, draws, space, like_it, self.layouts)


def solver_limit(nodes: int) -> str:
    """The note on layouts of a policy whose integer programs stop after ``nodes`` branch-and-bound nodes."""
    return f"; integer programs of at most {nodes} nodes"


def _with_other_capacities(trial: RankTrial, space: SearchSpace) -> list[RankTrial]:
    return [replace(trial, ranks=ranks) for ranks in other_capacities(trial.ranks, space)]


class _Begun(NamedTuple):
    """First steps of a trial that fits in memory."""

    trial: LayoutTrial
    steps: list[PricedStep]

    @property
    def seconds(self) -> float:
        return sum(step.price.seconds for step in self.steps)


def best_of(
    name: str,
    trials: Iterable[LayoutTrial],
    draws: Sequence[Sequence[Integers]],
    space: SearchSpace,
    like_it: Callable[[Any], Iterable[LayoutTrial]] | None = None,
    most: int | None = None,
) -> Outcome:
    """All steps of the fastest of ``trials`` (at most ``most`` are priced) and of the trials ``like_it``.

    The first step of the first draw orders the trials; the first steps of all draws order anew those near the fastest.
    The first one that fits in memory in every step is taken. Raises ``UserError`` if none does.
    """
    attempted = partial(_attempted, limit=limit_of_gpu(space.hardware.memory_bytes).number_of_bytes)
    first, *others = (batches[0] for batches in draws)
    found = sorted(islice(attempted(trials, [first]), most), key=_seconds)
    if found and like_it is not None:
        found = sorted([*found, *attempted(like_it(found[0].trial), [first])], key=_seconds)
    near = sum(one.seconds <= (1 + _NEAR) * found[0].seconds for one in found)
    nearest, slower = (
        (more for one in ones for more in attempted([one.trial], others, begun=one.steps))
        for ones in (found[:near], found[near:])
    )
    ordered = chain(sorted(nearest, key=_seconds), slower)
    later = [batch for batches in draws for batch in batches[1:]]
    fitting = next((whole for one in ordered for whole in attempted([one.trial], later, begun=one.steps)), None)
    if fitting is None:
        raise no_layout(name, space)
    trial, steps = fitting
    firsts, rest = steps[: len(draws)], iter(steps[len(draws) :])
    of_draws = [[first, *islice(rest, len(batches) - 1)] for first, batches in zip(firsts, draws, strict=True)]
    tokens = [int(step.trained.sum()) for step in steps]

    def work_of(lengths: Integers) -> float:
        return float(space.work_prices.document_seconds(lengths).sum())

    return Outcome(
        policy=name,
        layout=trial.layout,
        steps=len(of_draws[0]),
        draw_tokens=[sum(int(step.trained.sum()) for step in of_draw) for of_draw in of_draws],
        draw_seconds=[sum(step.price.seconds for step in of_draw) for of_draw in of_draws],
        draw_work=[sum(work_of(step.trained) for step in of_draw) for of_draw in of_draws],
        token_delay=0.0,
        tokens_cv=float(np.std(tokens) / np.mean(tokens)),
        exchanged_bytes=float(np.mean([step.price.exchanged_bytes for step in steps])),
        memory_bytes=max(step.price.memory_bytes for step in steps),
        planning_seconds=float(np.mean([step.planning_seconds for step in steps])),
        tried=len(found),
    )


def _attempted(
    trials: Iterable[LayoutTrial], batches: Sequence[Integers], limit: float, begun: Sequence[PricedStep] = ()
) -> Iterator[_Begun]:
    """The steps in every trial in which the policy finds plans that fit, after the steps ``begun``."""
    for trial in trials:
        with suppress(UserError):  # for instance, a group would need more ranks than there are
            steps = [*begun]
            for batch in batches:
                steps.append(trial.step(batch))
                if steps[-1].price.memory_bytes > limit:
                    break
            else:
                yield _Begun(trial, steps)


def batches_of_draws(lengths: Integers, space: SearchSpace, steps: int | None = None) -> list[list[Integers]]:
    """Lengths of the documents in each step of each draw, for the steps that ``wlb.simulate.verdict`` counts."""
    usual = usual_steps(space.global_batch)
    return [[*islice(batches_of(lengths, space, draw), usual, usual + (steps or usual))] for draw in range(DRAWS)]


def batches_of(lengths: Integers, space: SearchSpace, draw: int = 0) -> Iterator[Integers]:
    """Lengths of the documents, step by step, as in ``balanced`` packing.

    A step has the documents that begin in its global batch of the stream, in the trainer's order, epoch after epoch.
    Documents over the window are cut as the trainer cuts them.
    """
    config = DataConfig(store="documents", context_window=space.context_window, seed=draw)
    return global_batches(lengths, config, space.batch_tokens)
