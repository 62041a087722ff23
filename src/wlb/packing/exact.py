"""The integer programs of WLB-LLM, solved exactly: which document goes into which micro-batch.

Minimise the largest micro-batch workload, where document i costs ``seconds[i]`` and every micro-batch holds at most
``capacity`` tokens. With ``capacity`` the context window this is Equation 1 (section 2.3, fixed-length packing); with
L_max and prices W_a + W_l it is Equation 2 (section 4.1, variable-length packing). Solved by HiGHS through SciPy.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from wlb.errors import require

_MOST_VARIABLES = 2**20  # documents x micro-batches: a GiB, and minutes before the first branch


@dataclass(frozen=True)
class ExactPacking:
    """``assignment[i]`` is the micro-batch of document i.

    ``largest_seconds`` is what the assignment reaches and ``bound_seconds`` what no assignment can undercut.
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
    capacity: int,
    *,
    start: Sequence[int],
    time_limit: float | None = None,
    node_limit: int | None = None,
    relative_gap: float = 1e-4,
) -> ExactPacking:
    """Assign every document to one of ``micro_batches`` micro-batches, at the least largest workload.

    ``start`` is a feasible assignment; it is returned where the solver finds none better within ``time_limit``
    seconds and ``node_limit`` branch-and-bound nodes, and where there are over 2^20 pairs of a document and a
    micro-batch. A time limit makes the result depend on the machine's speed, the other bounds do not.
    """
    optimize = require("scipy.optimize", "solver")
    sparse = require("scipy.sparse", "solver")
    price = np.asarray(seconds, np.float64)
    first = np.asarray(start, np.int64)
    first_loads = np.bincount(first, price, micro_batches)
    bound = max(price.sum() / micro_batches, price.max(initial=0.0))
    unchanged = ExactPacking(first, float(first_loads.max()), float(bound))
    if unchanged.optimality_gap <= relative_gap or len(lengths) * micro_batches > _MOST_VARIABLES:
        return unchanged

    # Columns: x[i, j] = document i is in micro-batch j, document-major, then the largest load. Prices are scaled to a
    # mean micro-batch load of 1, so that the solver's absolute tolerances mean the same for every model.
    documents = len(lengths)
    scale = micro_batches / price.sum()
    of_document = sparse.kron(sparse.eye(documents), np.ones((1, micro_batches)))
    tokens_of = sparse.kron(np.asarray(lengths, np.float64)[None, :], sparse.eye(micro_batches))
    load_of = sparse.kron(price[None, :] * scale, sparse.eye(micro_batches))
    column = sparse.csr_matrix
    no_column = column((documents, 1))
    constraints = [
        optimize.LinearConstraint(sparse.hstack([of_document, no_column]), 1, 1),
        optimize.LinearConstraint(sparse.hstack([tokens_of, column((micro_batches, 1))]), -np.inf, capacity),
        optimize.LinearConstraint(sparse.hstack([load_of, -np.ones((micro_batches, 1))]), -np.inf, 0),
    ]
    lower, upper = np.zeros(documents * micro_batches + 1), np.ones(documents * micro_batches + 1)
    _break_symmetry(upper, np.argsort(-price, kind="stable"), micro_batches)
    lower[-1], upper[-1] = bound * scale, unchanged.largest_seconds * scale
    options: dict[str, float] = {"mip_rel_gap": relative_gap}
    if time_limit is not None:
        options["time_limit"] = time_limit
    if node_limit is not None:
        options["node_limit"] = node_limit
    with _silent_stdout():
        result = optimize.milp(
            c=np.append(np.zeros(documents * micro_batches), 1.0),
            integrality=np.append(np.ones(documents * micro_batches), 0),
            bounds=optimize.Bounds(lower, upper),
            constraints=constraints,
            options=options,
        )
    if result.mip_dual_bound is not None:
        bound = max(bound, min(result.mip_dual_bound / scale, unchanged.largest_seconds))
    if result.x is None:
        return ExactPacking(first, unchanged.largest_seconds, float(bound))
    assignment = result.x[:-1].reshape(documents, micro_batches).argmax(1).astype(np.int64)
    largest = float(np.bincount(assignment, price, micro_batches).max())
    fullest = np.bincount(assignment, lengths, micro_batches).max()  # the solver keeps to capacity within a tolerance
    if largest >= unchanged.largest_seconds or fullest > capacity:
        return ExactPacking(first, unchanged.largest_seconds, float(bound))
    return ExactPacking(assignment, largest, float(bound))


_stdout_in_use = Lock()


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Discard what C code writes to file descriptor 1: HiGHS prints there unasked, into the caller's JSON.

    One solve at a time, or the second would keep the first one's redirection as the original.
    """
    with _stdout_in_use:
        sys.stdout.flush()
        original = os.dup(1)
        try:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            yield
        finally:
            ctypes.CDLL(None).fflush(None)  # what C still buffers must not come out after the restoration
            os.dup2(original, 1)
            os.close(original)


def _break_symmetry(upper: NDArray[np.float64], by_price: NDArray[np.int64], micro_batches: int) -> None:
    """Micro-batches are interchangeable: the k-th dearest document may use only the first k of them."""
    for rank, document in enumerate(by_price[: micro_batches - 1]):
        upper[document * micro_batches + rank + 1 : (document + 1) * micro_batches] = 0
