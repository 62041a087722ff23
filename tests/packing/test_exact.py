"""The integer program against enumeration of every assignment."""

import ctypes
import os
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.streams import SETTINGS, WORKLOADS
from wlb.packing import exact
from wlb.packing.exact import ExactPacking, solve
from wlb.packing.registry import make_packer

small = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 50)), min_size=1, max_size=7)


def enumerated(lengths, seconds, micro_batches, capacity):
    """Every feasible assignment and its largest micro-batch, best first."""
    assignments = np.array(list(product(range(micro_batches), repeat=len(lengths))))
    member = assignments[:, None, :] == np.arange(micro_batches)[:, None]
    feasible = (member * np.array(lengths)).sum(2).max(1) <= capacity
    largest = (member * np.array(seconds, float)).sum(2).max(1)
    return sorted(zip(largest[feasible].tolist(), map(tuple, assignments[feasible].tolist()), strict=True))


@SETTINGS
@given(small, st.integers(1, 3), st.integers(0, 60), st.integers(0, 10**6))
def test_finds_what_enumeration_finds(documents, micro_batches, spare, choice):
    lengths, seconds = zip(*documents, strict=True)
    capacity = max(lengths) + spare
    feasible = enumerated(lengths, seconds, micro_batches, capacity)
    if not feasible:
        return
    start = feasible[choice % len(feasible)][1]
    packing = solve(lengths, seconds, micro_batches, capacity, start=start, relative_gap=1e-9)
    assert packing.largest_seconds == feasible[0][0]
    assert packing.largest_seconds == max(np.bincount(packing.assignment, seconds, micro_batches))
    assert max(np.bincount(packing.assignment, lengths, micro_batches)) <= capacity
    assert packing.optimality_gap == pytest.approx(0, abs=1e-6)
    assert packing.bound_seconds <= packing.largest_seconds * (1 + 1e-9)


@SETTINGS
@given(small, st.integers(2, 3), st.integers(0, 10**6))
def test_keeps_the_start_where_nothing_is_better(documents, micro_batches, choice):
    lengths, seconds = zip(*documents, strict=True)
    feasible = enumerated(lengths, seconds, micro_batches, sum(lengths))
    best = [assignment for largest, assignment in feasible if largest == feasible[0][0]]
    start = best[choice % len(best)]
    assert tuple(solve(lengths, seconds, micro_batches, sum(lengths), start=start).assignment) == start


def test_stops_at_its_limits_with_an_honest_gap():
    random = np.random.default_rng(3)
    lengths = random.integers(1, 1000, 40).tolist()
    seconds = [length**2.0 for length in lengths]
    start = [index % 7 for index in range(40)]
    packing = solve(lengths, seconds, 7, sum(lengths), start=start, node_limit=0)
    assert packing.bound_seconds >= max(sum(seconds) / 7, *seconds)
    assert packing.largest_seconds <= np.bincount(start, seconds).max()
    assert packing.optimality_gap == packing.largest_seconds / packing.bound_seconds - 1


def test_a_program_too_large_to_build_is_not_built(monkeypatch):
    monkeypatch.setattr(scipy.optimize, "milp", pytest.fail)
    start = [0, 0, *range(1, 2**16 - 1)]
    packing = solve([1] * 2**16, [1.0] * 2**16, 2**16, 2, start=start)
    assert packing.assignment.tolist() == start
    assert packing.optimality_gap == 1.0


def test_no_documents_are_no_problem():
    packing = solve([], [], 3, 10, start=[])
    assert (len(packing.assignment), packing.largest_seconds, packing.optimality_gap) == (0, 0.0, 0.0)


def test_an_assignment_beyond_capacity_is_not_taken(monkeypatch):
    result = SimpleNamespace(x=np.array([1, 0, 1, 0, 0, 1, 0.5]), mip_dual_bound=None)
    monkeypatch.setattr(scipy.optimize, "milp", lambda **arguments: result)
    assert solve([5, 6, 5], [1.0, 1.0, 9.0], 2, 10, start=[0, 1, 0]).assignment.tolist() == [0, 1, 0]
    assert solve([5, 6, 5], [1.0, 1.0, 9.0], 2, 11, start=[0, 1, 0]).assignment.tolist() == [0, 0, 1]


def test_the_solver_packer_leaves_no_micro_batch_empty(monkeypatch):
    together = ExactPacking(np.zeros(4, np.int64), 4.0, 4.0)
    monkeypatch.setattr(exact, "solve", lambda *documents, **limits: together)
    packer = make_packer("fixed_solver", micro_batches=3, context_window=8, workload=WORKLOADS["7b"])
    (plan,) = packer.plan([2, 2, 2, 2]) + packer.drain()
    assert sorted(len(micro_batch.segments) for micro_batch in plan.micro_batches) == [1, 1, 2]


def printing(original, fail):
    def milp(**arguments):
        ctypes.CDLL(None).printf(b"printed by the solver, buffered in C\n")
        os.write(1, b"printed by the solver\n")
        if fail:
            raise RuntimeError("the solver failed")
        return original(**arguments)

    return milp


def test_the_solver_prints_nothing(capfd, monkeypatch):
    print("before", flush=True)
    for fail in (False, True):
        monkeypatch.setattr(scipy.optimize, "milp", printing(scipy.optimize.milp, fail))
        try:
            solve([3, 3, 2], [3.0, 3.0, 2.0], 2, 10, start=[0, 0, 0])
        except RuntimeError:
            assert fail
    ctypes.CDLL(None).fflush(None)  # what the solver left in C's buffer would come out now
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "before\nafter\n"
