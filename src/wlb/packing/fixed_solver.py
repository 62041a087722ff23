"""Fixed-length packing by integer programming: the paper's costly upper baseline (WLB-LLM, section 2.3)."""

from __future__ import annotations

from wlb.packing.exact import solve
from wlb.packing.fixed_greedy import FixedGreedyPacker
from wlb.packing.greedy import OpenMicroBatches
from wlb.workload.base import DocumentPrices


class FixedSolverPacker(FixedGreedyPacker):
    """Places the documents that greedy packing fits into a window of global batches as well as can be.

    Which documents fit is decided greedily; where each of them goes is decided by ``wlb.packing.exact.solve``.
    ``node_limit`` bounds the search the same way on every machine; ``time_limit`` (seconds per solve) does not, so
    plans that several processes must agree on need a node limit alone. ``optimality_gaps`` collects, per solve, how
    far the result may be from the optimum, as a fraction.
    """

    name = "fixed_solver"

    def __init__(
        self,
        *,
        micro_batches: int,
        context_window: int,
        workload: DocumentPrices,
        window: int = 1,
        max_delay: int | None = None,
        time_limit: float | None = None,
        node_limit: int | None = None,
    ) -> None:
        super().__init__(
            micro_batches=micro_batches,
            context_window=context_window,
            workload=workload,
            window=window,
            max_delay=max_delay,
        )
        self.time_limit = time_limit
        self.node_limit = node_limit
        self.optimality_gaps: list[float] = []

    def _improved(self, filled: OpenMicroBatches) -> OpenMicroBatches:
        placed = [(item, index) for index, members in enumerate(filled.members) for item in members]
        solution = solve(
            [item.length for item, _ in placed],
            [item.seconds for item, _ in placed],
            len(filled.members),
            self.capacity,
            start=[index for _, index in placed],
            time_limit=self.time_limit,
            node_limit=self.node_limit,
        )
        self.optimality_gaps.append(solution.optimality_gap)
        solved = OpenMicroBatches(len(filled.members), self.capacity)
        for (item, _), index in zip(placed, solution.assignment.tolist(), strict=True):
            solved.put(item, index)
        solved.fill_empty()
        return solved
