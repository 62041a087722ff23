"""Fixed-length packing: whole documents, at most a context window per micro-batch (fixed-4D).

Packing ``window`` global batches together balances better, at the price of changing which step trains which
document (WLB-LLM, sections 2.3 and 7.2). ``fixed_greedy`` places documents greedily; ``fixed_solver``, the paper's
costly upper baseline, lets an integer program improve the placement (section 2.3).
"""

from __future__ import annotations

from typing import Any

from wlb.packing.carrying import CarryingPacker
from wlb.packing.exact import solve
from wlb.packing.placement import OpenMicroBatches


class FixedGreedyPacker(CarryingPacker):
    """Longest document first into the lightest micro-batch with room."""

    name = "fixed_greedy"


class FixedSolverPacker(CarryingPacker):
    """Places the documents that greedy packing fits into a round of global batches as well as can be.

    Which documents fit is decided greedily; where each of them goes is decided by ``wlb.packing.exact.solve``.
    ``optimality_gaps`` collects, per solve, how far the result may be from the optimum, as a fraction. A study may set
    ``time_limit``, seconds of a solve, in place of ``solver_nodes``; machines of another speed then plan differently.
    """

    name = "fixed_solver"
    time_limit: float | None = None

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.optimality_gaps: list[float] = []

    def _improved(self, filled: OpenMicroBatches) -> OpenMicroBatches:
        placed = [(item, index) for index, members in enumerate(filled.members) for item in members]
        solution = solve(
            [item.held for item, _ in placed],
            [item.seconds for item, _ in placed],
            len(filled.members),
            self.capacity,
            start=[index for _, index in placed],
            time_limit=self.time_limit,
            node_limit=self.options.solver_nodes if self.time_limit is None else None,
        )
        self.optimality_gaps.append(solution.optimality_gap)
        solved = OpenMicroBatches(len(filled.members), self.capacity)
        for (item, _), index in zip(placed, solution.assignment.tolist(), strict=True):
            solved.put(item, index)
        solved.fill_empty()
        return solved
