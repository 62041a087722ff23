"""What packers make of documents, as points in (delay, cost), and whether one set of points covers another.

A point is one setting of one packer on one corpus. Cost is the imbalance degree or the pipeline cost: simulated step
seconds over those of a perfectly balanced step, after assignment to ranks and order in the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.segments import Segment
from wlb.packing.packer import PackingTask
from wlb.packing.tuning import search, trade_off
from wlb.packing.variable_length import VariableLengthOptions
from wlb.report.plots import pyplot_without_display
from wlb.simulate import SimulatedJob
from wlb.simulate.compare import MethodResult, compare_packer, packer_for

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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Corpus:
    """The documents of one corpus, and the job that trains them."""

    def __init__(self, lengths: NDArray[np.int64], job: SimulatedJob) -> None:
        self.lengths = lengths
        self.job = job
        self._documents = [Segment(document, 0, length) for document, length in enumerate(lengths.tolist())]

    def point(self, packer: str, length_factor: float = 1.0, **setting: Any) -> Point:
        """Pack the corpus once."""
        planner = packer_for(packer, self.job, max_length_factor=length_factor, **setting)
        row = compare_packer(packer, planner, self._documents, self.job)
        return _point(row, length_factor, setting)

    def tuned(self, length_factor: float) -> list[tuple[int, ...]]:
        """The outlier thresholds on the trade-off curve of ``variable_length``, by its own search."""
        trials = search(
            self.lengths,
            PackingTask(self.job.packing.micro_batches, self.job.context_window, self.job.workload),
            VariableLengthOptions(max_delay=MAX_DELAY),
            factors=[length_factor],
        )
        return [trial.outlier_thresholds for trial in trade_off(trials)]


def _point(row: MethodResult, length_factor: float, setting: dict[str, Any]) -> Point:
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


def makespan_points(corpus: Corpus, length_factor: float) -> list[Point]:
    """The settings of the trade-off curve, and those in which nothing waits."""
    points = []
    for lookahead, spread in product(LOOKAHEADS, TOKEN_SPREADS):
        setting = {"lookahead": lookahead, "token_spread": spread}
        points.append(corpus.point("makespan", length_factor, max_delay=0, **setting))
        points += [
            corpus.point("makespan", length_factor, max_delay=MAX_DELAY, delay_price=price, **setting)
            for price in DELAY_PRICES
        ]
    return points


def other_points(corpus: Corpus, length_factor: float, thresholds: Iterable[tuple[int, ...]]) -> list[Point]:
    """``sequential``, and ``variable_length`` with each of ``thresholds``."""
    return [corpus.point("sequential")] + [
        corpus.point("variable_length", length_factor, outlier_thresholds=queues, max_delay=MAX_DELAY)
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def violations(corpus: str, ours: Sequence[Point], others: Iterable[Point]) -> Iterator[Violation]:
    """Where a point of ``others`` has less cost than every one of ``ours`` with no more delay."""
    for point, cost in product(others, COSTS):
        reached = min((getattr(p, cost) for p in ours if p.delay <= point.delay + _NOISE), default=float("inf"))
        if reached > getattr(point, cost) + _NOISE:
            cuts = "cuts documents" if point.packer == "sequential" else ""
            yield Violation(corpus, cost, point, reached, "within 0.3% of balance" if reached < 1.003 else cuts)


def front(points: Iterable[Point], cost: str) -> list[Point]:
    """The points that no other beats in both delay and ``cost``, by rising delay."""
    result: list[Point] = []
    for point in sorted(points, key=lambda p: (p.delay, getattr(p, cost))):
        if not result or getattr(point, cost) < getattr(result[-1], cost):
            result.append(point)
    return result


def draw_curves(curves: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Imbalance over token delay, one panel a corpus."""
    pyplot = pyplot_without_display()
    columns = min(4, len(curves))
    rows = -(-len(curves) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(3.6 * columns, 3 * rows), squeeze=False)
    for panel in panels.flat[len(curves) :]:
        panel.axis("off")
    for panel, (title, points) in zip(panels.flat, curves.items(), strict=False):
        for packer, colour in (("variable_length", "#d97b4a"), ("makespan", "#2f6690"), ("sequential", "#555555")):
            line = front([point for point in points if point.packer == packer], "imbalance")
            panel.plot([p.delay for p in line], [p.imbalance for p in line], "o-", color=colour, ms=3, label=packer)
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("mean token delay, steps", fontsize=8)
        panel.set_ylabel("imbalance degree", fontsize=8)
    panels.flat[0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
