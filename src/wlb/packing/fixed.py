"""Fixed-length packing: whole documents, at most a context window per micro-batch (fixed-4D).

Packing ``window`` global batches together balances better, at the price of changing which step trains which
document (WLB-LLM, sections 2.3 and 7.2). ``fixed_greedy`` places documents greedily; ``fixed_solver``, the paper's
costly upper baseline, lets an integer program improve the placement (section 2.3).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from wlb.packing.carrying import CarryingPacker
from wlb.packing.exact import solve
from wlb.packing.options import DelayOptions, whole_number
from wlb.packing.packer import PackingTask
from wlb.packing.placement import OpenMicroBatches
from wlb.settings import MicroBatchCount, Number, PositiveInt


class FixedOptions(DelayOptions):
    """Options of ``fixed_greedy``."""

    window: MicroBatchCount = Field(1, description="Global batches packed together")

    @property
    def global_batches(self) -> int:
        return self.window

    @classmethod
    def from_argument(cls, argument: str, context_window: int) -> dict[str, object]:
        """The number of global batches packed together."""
        return {"window": whole_number(argument, least=1)}


class SolverOptions(FixedOptions):
    """Options of ``fixed_solver``; one with a time limit plans differently on machines of different speed."""

    solver_nodes: Annotated[PositiveInt, Field(le=100_000)] = Field(
        1000, description="Branch-and-bound nodes of one solve"
    )
    solver_seconds: Number | None = Field(None, gt=0, exclude=True, description="Longest time of one solve")

    def identity(self, context_window: int) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"solver_nodes"})  # they place documents within their step

    @property
    def node_limit(self) -> int | None:
        """A solve with a time limit has no other, unless asked for."""
        by_time_alone = self.solver_seconds is not None and "solver_nodes" not in self.model_fields_set
        return None if by_time_alone else self.solver_nodes


class FixedGreedyPacker(CarryingPacker[FixedOptions]):
    """Longest document first into the lightest micro-batch with room."""

    name = "fixed_greedy"
    options_class = FixedOptions


class FixedSolverPacker(CarryingPacker[SolverOptions]):
    """Places the documents that greedy packing fits into a round of global batches as well as can be.

    Which documents fit is decided greedily; where each of them goes is decided by ``wlb.packing.exact.solve``.
    ``optimality_gaps`` collects, per solve, how far the result may be from the optimum, as a fraction.
    """

    name = "fixed_solver"
    options_class = SolverOptions

    def __init__(self, task: PackingTask, options: SolverOptions) -> None:
        super().__init__(task, options)
        self.optimality_gaps: list[float] = []

    def _improved(self, filled: OpenMicroBatches) -> OpenMicroBatches:
        placed = [(item, index) for index, members in enumerate(filled.members) for item in members]
        solution = solve(
            [item.held for item, _ in placed],
            [item.seconds for item, _ in placed],
            len(filled.members),
            self.capacity,
            start=[index for _, index in placed],
            time_limit=self.options.solver_seconds,
            node_limit=self.options.node_limit,
        )
        self.optimality_gaps.append(solution.optimality_gap)
        solved = OpenMicroBatches(len(filled.members), self.capacity)
        for (item, _), index in zip(placed, solution.assignment.tolist(), strict=True):
            solved.put(item, index)
        solved.fill_empty()
        return solved
