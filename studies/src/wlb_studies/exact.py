"""The integer programs of WLB-LLM, solved exactly, and ``fixed_solver``, the paper's costly upper baseline.

Minimise the largest micro-batch workload, where document i costs ``seconds[i]`` and every micro-batch holds at most
``max_tokens`` tokens. With the context window as ``max_tokens`` this is Equation 1 (section 2.3, fixed-length packing);
with L_max and prices W_a + W_l it is Equation 2 (section 4.1, variable-length packing). Solved by HiGHS through SciPy.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.packing.carrying import FixedGreedyPacker, OpenMicroBatches
from wlb.packing.packer import Pending
from wlb.packing.plan import StepPlan

_MOST_VARIABLES = 2**20  # documents x micro-batches: a GiB, and minutes before the first branch


class FixedSolverPacker(FixedGreedyPacker):
    """Optimal placement of the documents that greedy packing fits into a round of global batches.

    Greedy packing decides which documents fit; ``solve`` decides where each of them goes, within ``solver_nodes``
    branch-and-bound nodes or, if it is set, ``time_limit`` seconds per solve; plans then depend on the speed of the
    machine. ``optimality_gaps`` collects how far each result may be from the optimum, as a fraction.
    """

    name = "fixed_solver"
    solver_nodes = 1000
    time_limit: float | None = None

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.optimality_gaps: list[float] = []

    def _emit_filled(self, filled: OpenMicroBatches) -> list[StepPlan]:
        placed = [(item, index) for index, members in enumerate(filled.members) for item in members]
        solution = solve(
            [item.length for item, _ in placed],
            [item.seconds for item, _ in placed],
            len(filled.members),
            self.max_tokens,
            start=[index for _, index in placed],
            time_limit=self.time_limit,
            node_limit=self.solver_nodes if self.time_limit is None else None,
        )
        self.optimality_gaps.append(solution.optimality_gap)
        solved = OpenMicroBatches(len(filled.members), self.max_tokens)
        for (item, _), index in zip(placed, solution.assignment.tolist(), strict=True):
            put(solved, item, index)
        fill_empty(solved)
        return super()._emit_filled(solved)


def put(filled: OpenMicroBatches, item: Pending, index: int) -> None:
    """Place ``item`` into micro-batch ``index``, which must have room."""
    filled.members[index].append(item)
    filled.seconds[index] += item.seconds
    filled.tokens[index] += item.length


def fill_empty(filled: OpenMicroBatches) -> None:
    """Fill empty micro-batches with single documents of the heaviest micro-batches that hold several."""
    for index in [index for index, members in enumerate(filled.members) if not members]:
        several = (other for other, held in enumerate(filled.members) if len(held) > 1)
        if (heaviest := max(several, key=filled.seconds.__getitem__, default=None)) is None:
            return
        item = filled.members[heaviest].pop()
        filled.seconds[heaviest] -= item.seconds
        filled.tokens[heaviest] -= item.length
        put(filled, item, index)


@dataclass(frozen=True)
class ExactPacking:
    """``assignment[i]`` is the micro-batch of document i.

    ``largest_seconds`` is the largest workload of the assignment, ``bound_seconds`` a lower bound for any assignment.
    """

    assignment: NDArray[np.int64]
    largest_seconds: float
    bound_seconds: float

    @property
    def optimality_gap(self) -> float:
        """How far, as a fraction, the assignment may be above the optimum; 0.0 is proven optimal."""
        return max(0.0, self.largest_seconds / self.bound_seconds - 1) if self.bound_seconds else 0.0


def solve(
    lengths: Sequence[int],
    seconds: Sequence[float],
    micro_batches: int,
    max_tokens: int,
    *,
    start: Sequence[int],
    time_limit: float | None = None,
    node_limit: int | None = None,
    relative_gap: float = 1e-4,
) -> ExactPacking:
    """Assign every document to one of ``micro_batches`` micro-batches so that the largest workload is smallest.

    ``start`` is a feasible assignment. It is returned if the solver finds none better within ``time_limit`` seconds and
    ``node_limit`` branch-and-bound nodes, or if there are over 2^20 pairs of a document and a micro-batch. With a time
    limit the result depends on the speed of the machine; with the other limits it does not.
    """
    price, first = np.asarray(seconds, np.float64), np.asarray(start, np.int64)
    bound = max(price.sum() / micro_batches, price.max(initial=0.0))
    best = ExactPacking(first, _largest(first, price, micro_batches), float(bound))
    if best.optimality_gap <= relative_gap or len(lengths) * micro_batches > _MOST_VARIABLES:
        return best
    options = {"mip_rel_gap": relative_gap, "time_limit": time_limit, "node_limit": node_limit}
    assignment, bound = _branch_and_bound(lengths, price, micro_batches, max_tokens, best, options)
    best = replace(best, bound_seconds=max(best.bound_seconds, min(bound, best.largest_seconds)))
    if assignment is not None:
        largest = _largest(assignment, price, micro_batches)
        fullest = _largest(assignment, lengths, micro_batches)  # the solver has a tolerance
        if largest < best.largest_seconds and fullest <= max_tokens:
            return replace(best, assignment=assignment.astype(np.int64), largest_seconds=largest)
    return best


def _largest(assignment: NDArray[np.integer], values: ArrayLike, micro_batches: int) -> float:
    """The largest sum of ``values``, one for each document, in a micro-batch."""
    return float(np.bincount(assignment, values, micro_batches).max())


def _branch_and_bound(
    lengths: Sequence[int],
    price: NDArray[np.float64],
    micro_batches: int,
    max_tokens: int,
    known: ExactPacking,
    options: dict[str, float | None],
) -> tuple[NDArray[np.intp] | None, float]:
    """The assignment that HiGHS finds, if any, and its lower bound in seconds, starting from ``known``.

    Columns: x[i, j] = document i is in micro-batch j, document-major, then the largest load. Prices are scaled to a
    mean load of 1, so that the absolute tolerances of the solver mean the same for every model.
    """
    optimize, sparse = import_module("scipy.optimize"), import_module("scipy.sparse")
    documents, scale = len(lengths), micro_batches / price.sum()
    of_document = sparse.kron(sparse.eye(documents), np.ones((1, micro_batches)))
    tokens_of = sparse.kron(np.asarray(lengths, np.float64)[None], sparse.eye(micro_batches))
    load_of = sparse.kron(price[None] * scale, sparse.eye(micro_batches))
    rows = sparse.bmat([[of_document, None], [tokens_of, None], [load_of, -np.ones((micro_batches, 1))]])
    least = np.concatenate([np.ones(documents), np.full(2 * micro_batches, -np.inf)])
    most = np.concatenate([np.ones(documents), np.full(micro_batches, max_tokens), np.zeros(micro_batches)])
    # Micro-batches are interchangeable: the k-th most expensive document may use only the first k of them.
    allowed = np.ones((documents, micro_batches))
    costliest = np.argsort(-price, kind="stable")[: micro_batches - 1]
    allowed[costliest] = np.tri(len(costliest), micro_batches)
    upper = np.append(allowed, known.largest_seconds * scale)
    is_load = np.arange(upper.size) == upper.size - 1
    with _silent_stdout():
        result = optimize.milp(
            c=is_load.astype(np.float64),
            integrality=~is_load,
            bounds=optimize.Bounds(is_load * known.bound_seconds * scale, upper),
            constraints=optimize.LinearConstraint(rows, least, most),
            options={name: value for name, value in options.items() if value is not None},
        )
    bound = 0.0 if result.mip_dual_bound is None else float(result.mip_dual_bound / scale)
    found = None if result.x is None else result.x[:-1].reshape(documents, micro_batches).argmax(1)
    return found, bound


_stdout_in_use = Lock()


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Discard what C code writes to file descriptor 1, where HiGHS would print into the JSON of the caller.

    Only one solve at a time: a second one would take the redirection for the original.
    """
    with _stdout_in_use:
        sys.stdout.flush()
        original = os.dup(1)
        try:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            yield
        finally:
            ctypes.CDLL(None).fflush(None)  # or C would print its buffer after the restoration
            os.dup2(original, 1)
            os.close(original)
