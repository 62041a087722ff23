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

from tests.packing.streams import SETTINGS, WORKLOADS, plan_all
from tests.packing.test_carrying import pending
from wlb.packing.carrying import OpenMicroBatches
from wlb.packing.options import PackingOptions
from wlb.packing.registry import make_packer
from wlb_studies import exact
from wlb_studies.exact import ExactPacking, FixedSolverPacker, fill_empty, put, solve

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
    packer = FixedSolverPacker(3, 8, WORKLOADS["7b"], PackingOptions(method="fixed_greedy"))
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


def test_both_heaps_know_what_was_put():
    filled = OpenMicroBatches(2, 10)
    long, *short, too_long, one, last, beside = pending([8, *[1] * 9, 7, 1, 1, 1], "square")
    assert filled.place([long, *short, too_long]) == [too_long]  # which asks for the shortest micro-batch
    put(filled, one, 0)
    assert filled.place([last, beside]) == []
    assert filled.members == [[long, one, beside], [*short, last]]


@SETTINGS
@given(st.lists(st.integers(1, 9), max_size=12), st.lists(st.integers(0, 4), min_size=12, max_size=12))
def test_filling_empty_micro_batches_keeps_every_document(lengths, places):
    filled = OpenMicroBatches(5, 1000)
    items = pending(lengths)
    for item, index in zip(items, places, strict=False):
        put(filled, item, index)
    before = max(filled.seconds)
    fill_empty(filled)
    assert sorted(item for members in filled.members for item in members) == sorted(items)
    held = sorted(len(members) for members in filled.members)
    assert held[0] > 0 or held[-1] <= 1
    assert max(filled.seconds) <= before
    assert filled.seconds == [sum(item.seconds for item in members) for members in filled.members]


@SETTINGS
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 3))
def test_a_variable_length_step_is_within_the_bound_of_longest_first(lengths, micro_batches):
    """Graham 1969: longest processing time first is at most 4/3 - 1/(3N) above the optimum, without L_max."""
    packer = make_packer(
        "variable_length",
        micro_batches=micro_batches,
        context_window=sum(lengths),
        workload=WORKLOADS["polynomial"],
        max_length_factor=3,
    )
    (plan,) = packer.plan(lengths) + packer.drain()
    seconds = [item.seconds for item in pending(lengths)]
    best = solve(lengths, seconds, micro_batches, packer.max_tokens, start=[0] * len(lengths), relative_gap=1e-9)
    largest = max(micro_batch.workload for micro_batch in plan.micro_batches)
    bound = 4 / 3 - 1 / (3 * micro_batches)
    assert best.largest_seconds <= largest * (1 + 1e-6)
    assert largest <= bound * best.largest_seconds * (1 + 1e-6)


@SETTINGS
@given(st.lists(st.integers(1, 8), min_size=1, max_size=16), st.integers(1, 3), st.integers(1, 2))
def test_the_solver_packer_trains_every_document_once(lengths, micro_batches, window):
    packer = FixedSolverPacker(micro_batches, 8, WORKLOADS["7b"], PackingOptions(method="fixed_greedy", window=window))
    packer.solver_nodes = 5
    plans = plan_all(packer, lengths)
    trained = sorted(segment for plan in plans for segment in plan.segments)
    assert [(document, length) for document, _, length in trained] == [*enumerate(lengths)]
