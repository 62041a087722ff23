"""What packers make of documents, as points in (delay, cost), and whether one set of points covers another.

A point is one setting of one packer on one corpus. Cost is the imbalance degree or the pipeline cost: simulated step
seconds over those of a perfectly balanced step, after assignment to ranks and order in the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from parts.documents import Lengths, segments
from wlb.job.job import Job
from wlb.packing.options import PackingOptions
from wlb_studies.packing import compare_packer, packer_for
from wlb_studies.thresholds import search, trade_off

DELAY_PRICES = (0.02, 0.035, 0.05, 0.1, 0.2, 0.4, 1.0, 1.5, 4.0)
LOOKAHEADS = (0.0, 0.5)
TOKEN_SPREADS = (0.25, 0.75)
LENGTH_FACTORS = (1.25, 1.5, 2.0)
COSTS = ("imbalance", "pipeline_cost")
MAX_DELAY = 8  # of both packers

_NOISE = 5e-4  # differences that mean nothing in a cost, and in steps of delay


@dataclass(frozen=True)
class Point:
    """``length_factor`` is L_max in windows; ``setting`` the other options of the packer."""

    packer: str
    length_factor: float
    setting: dict[str, Any]
    delay: float
    longest_delay: int
    imbalance: float
    pipeline_cost: float
    tokens_per_step_cv: float

    def row(self) -> dict[str, Any]:
        """As it is shown."""
        words = [f"{name} {value}" for name, value in self.setting.items() if name != "max_delay" or not value]
        return {
            "packer": self.packer,
            "setting": ", ".join(words),
            "token_delay": self.delay,
            "longest": self.longest_delay,
            "imbalance": self.imbalance,
            "pipeline_cost": self.pipeline_cost,
            "tokens_per_step_cv": self.tokens_per_step_cv,
        }


def point(lengths: Lengths, job: Job, packer: str, length_factor: float = 1.0, **setting: Any) -> Point:
    """Pack the documents of ``job`` once."""
    planner = packer_for(packer, job, max_length_factor=length_factor, **setting)
    row = compare_packer(packer, planner, segments(lengths), job)
    return Point(
        row.method,
        length_factor,
        setting,
        row.mean_token_delay,
        row.longest_delay,
        row.imbalance_degree,
        row.arranged.pipeline_cost,
        row.tokens_per_step_cv,
    )


def makespan_points(lengths: Lengths, job: Job, length_factor: float) -> list[Point]:
    """The settings of the trade-off curve, and those in which nothing waits."""
    waits: list[dict[str, Any]] = [
        {"max_delay": 0},
        *({"max_delay": MAX_DELAY, "delay_price": price} for price in DELAY_PRICES),
    ]
    return [
        point(lengths, job, "makespan", length_factor, **wait, lookahead=lookahead, token_spread=spread)
        for lookahead, spread, wait in product(LOOKAHEADS, TOKEN_SPREADS, waits)
    ]


def other_points(lengths: Lengths, job: Job, length_factor: float, few: Job) -> list[Point]:
    """``sequential``, and ``variable_length`` with the thresholds on the trade-off curve of its own search.

    They are searched for in ``few`` micro-batches, and hold for any number.
    """
    options = PackingOptions(method="variable_length", max_delay=MAX_DELAY)
    sizes = few.packing.micro_batches, few.context_window
    trials = search(lengths, *sizes, few.workload, options, factors=[length_factor])
    thresholds = [trial.outlier_thresholds for trial in trade_off(trials)]
    return [point(lengths, job, "sequential")] + [
        point(lengths, job, "variable_length", length_factor, outlier_thresholds=queues, max_delay=MAX_DELAY)
        for queues in thresholds
    ]


@dataclass(frozen=True)
class Violation:
    """A point of another packer that no point of ``makespan`` covers, with the least cost at no more delay.

    ``why`` names the two cases in which that says little: the other packer cuts documents, so it does less work; or
    ``makespan`` costs no more than perfectly balanced micro-batches, which is no bound: a pipeline is faster with light
    micro-batches at its ends.
    """

    corpus: str
    cost: str
    point: Point
    reached: float
    why: str

    def row(self) -> dict[str, Any]:
        """As it is shown."""
        return {
            "corpus": self.corpus,
            "cost": self.cost,
            "other": self.point.packer,
            "token_delay": self.point.delay,
            "its": getattr(self.point, self.cost),
            "makespan's": self.reached,
            "but": self.why,
        }


def violations(corpus: str, ours: Sequence[Point], others: Iterable[Point]) -> Iterator[Violation]:
    """Where a point of ``others`` has less cost than every one of ``ours`` with no more delay."""
    for other, cost in product(others, COSTS):
        reached = min((getattr(p, cost) for p in ours if p.delay <= other.delay + _NOISE), default=float("inf"))
        if reached > getattr(other, cost) + _NOISE:
            cuts = "cuts documents" if other.packer == "sequential" else ""
            yield Violation(corpus, cost, other, reached, "within 0.3% of balance" if reached < 1.003 else cuts)


def front(points: Iterable[Point]) -> list[Point]:
    """The points that no other beats in both delay and imbalance, by rising delay."""
    result: list[Point] = []
    for candidate in sorted(points, key=lambda p: (p.delay, p.imbalance)):
        if not result or candidate.imbalance < result[-1].imbalance:
            result.append(candidate)
    return result
