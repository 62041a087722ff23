"""``wlb.balance``: every document once, under the limit, as even as documents allow, and possible or refused."""

import heapq
import itertools
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import wlb
from tests.cases import in_turn
from wlb.errors import UserError
from wlb.packing.bins import fitting_bins
from wlb.workload import make_workload

WORKLOAD = make_workload("7b")


@st.composite
def tasks(draw: st.DrawFn) -> dict[str, Any]:
    parts = draw(st.integers(1, 6))
    equal_size = draw(st.booleans())
    count = parts * draw(st.integers(1, 12)) if equal_size else draw(st.integers(parts, 60))
    lengths = draw(st.lists(st.integers(0, 20_000), min_size=count, max_size=count))
    room = draw(st.sampled_from([None, 0.5, 1.02, 1.5, 4.0]))
    limit = None if room is None else max(*lengths, 1, int(room * sum(lengths) / parts) + 1)
    workload = draw(st.sampled_from([None, "tokens", WORKLOAD]))
    return {"lengths": lengths, "parts": parts, "max_tokens": limit, "equal_size": equal_size, "workload": workload}


@given(tasks())
def test_every_document_is_in_one_part_that_keeps_to_the_limits(task: dict[str, Any]):
    lengths, parts, limit = task["lengths"], task["parts"], task["max_tokens"]
    try:
        divided = wlb.balance(**task)
    except UserError:
        assert limit is not None, "without a limit all documents fit"
        return
    assert len(divided) == parts
    assert sorted(itertools.chain(*divided)) == list(range(len(lengths)))
    assert all(part and part == sorted(part) for part in divided)
    assert limit is None or all(sum(lengths[i] for i in part) <= limit for part in divided)
    assert not task["equal_size"] or len({len(part) for part in divided}) == 1
    assert divided == wlb.balance(**task)


def optimum(lengths: list[int], parts: int, most: int | None = None) -> float | None:
    """The smallest largest sum over all ways to divide, tried one by one; None where none keeps to ``most``."""
    best = None
    for assignment in itertools.product(range(parts), repeat=len(lengths)):
        sums = np.bincount(assignment, lengths, parts)
        if min(np.bincount(assignment, minlength=parts)) > 0 and (most is None or sums.max() <= most):
            best = sums.max() if best is None else min(best, sums.max())
    return best


@given(st.lists(st.integers(1, 40), min_size=3, max_size=7), st.integers(2, 3), st.sampled_from([None, 1.0, 1.1]))
def test_few_documents_fit_wherever_they_can(lengths: list[int], parts: int, room: float | None):
    most = None if room is None else int(room * -(-sum(lengths) // parts))
    best = optimum(lengths, parts, most)
    if best is None:
        with pytest.raises(UserError):
            wlb.balance(lengths, parts, most, workload="tokens")
    else:
        divided = wlb.balance(lengths, parts, most, workload="tokens")
        largest = max(sum(lengths[i] for i in part) for part in divided)
        assert largest <= (best * 4 / 3 if most is None else most)


def differencing(costs: list[float], parts: int, equal_size: bool) -> float:
    """The dearest part of Karmarkar and Karp's division, by which verl and OpenRLHF divide."""
    rising = sorted(costs)
    size = parts if equal_size else 1
    firsts = [rising[at : at + size] for at in range(0, len(rising), size)]
    heap = [(min(sums) - max(sums), sums) for sums in (sorted([0.0] * (parts - size) + first) for first in firsts)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, one), (_, other) = heapq.heappop(heap), heapq.heappop(heap)
        sums = sorted(a + b for a, b in zip(one, other[::-1], strict=True))
        heapq.heappush(heap, (sums[0] - sums[-1], sums))
    return heap[0][1][-1]


def longest_first(costs: list[float], parts: int) -> float:
    """The dearest part where each document, dearest first, goes into the cheapest part."""
    heap = [0.0] * parts
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(heap, heap[0] + cost)
    return max(heap)


@in_turn("equal_size", [False, True])
def test_of_200_divisions_none_is_less_even_than_that_of_differencing_or_of_a_heap(equal_size: bool):
    for seed in range(100):
        random = np.random.default_rng([equal_size, seed])
        parts = int(random.integers(2, 33))
        documents = parts * int(random.integers(1, 1 + 600 // parts))
        costs = random.lognormal(7, random.uniform(0.1, 2), documents).tolist()
        divided = wlb.balance([1] * documents, parts, equal_size=equal_size, costs=costs)
        ours = max(sum(costs[i] for i in part) for part in divided)
        assert ours <= differencing(costs, parts, equal_size) * (1 + (1e-12 if documents <= 256 else 1e-6))
        assert equal_size or ours <= longest_first(costs, parts) * (1 + 1e-12)


def drawn(seed: int, mean: float, spread: float, documents: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(mean, spread, documents).astype(int).clip(0, 100_000) + 16


@in_turn("equal_size", [False, True])
def test_whole_numbers_come_out_as_even_as_they_can(equal_size: bool):
    lengths = drawn(0, 6, 1, 512)
    parts = wlb.balance(lengths, 8, equal_size=equal_size, workload="tokens")
    assert max(lengths[part].sum() for part in parts) == -(-lengths.sum() // 8)


@in_turn(
    ("lengths", "equal_size", "room", "uneven"),
    [(drawn(1, 9, 1.2, 200), False, 1.1, 1.001), (drawn(3, 7, 1, 256), True, 1.2, 1.01)],
)
def test_work_is_balanced_by_default_and_the_limit_on_tokens_kept(lengths, equal_size, room, uneven):
    most = int(room * lengths.sum() / 8)
    parts = wlb.balance(lengths, 8, most, equal_size=equal_size)
    assert parts == wlb.balance(lengths, 8, most, equal_size=equal_size, workload=WORKLOAD)
    assert not equal_size or {len(part) for part in parts} == {32}
    loads = np.array([WORKLOAD.document_seconds(lengths)[part].sum() for part in parts])
    assert loads.max() < uneven * loads.mean()
    assert max(lengths[part].sum() for part in parts) <= most


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    ranks, multiple, equal_size = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.booleans())
    least = ranks * multiple
    count = least * draw(st.integers(1, 8)) if equal_size else draw(st.integers(least, 80))
    lengths = draw(st.lists(st.integers(1, 20_000), min_size=count, max_size=count))
    room = draw(st.sampled_from([None, 1.0, 2.0, 5.0]))
    return {
        "lengths": lengths,
        "ranks": ranks,
        "parts_multiple_of": multiple,
        "equal_size": equal_size,
        "max_tokens": None if room is None else int(room * max(lengths)),
        "costs": draw(st.sampled_from([None, [float(length % 7) for length in lengths]])),
    }


_NEAR_IN_PRICE = {"lengths": [190, 182, 179, 172, 172, 10, 173, 181, 191, 215], "ranks": 3, "parts_multiple_of": 3}


@given(steps())
@example(_NEAR_IN_PRICE | {"equal_size": False, "max_tokens": None, "costs": None})
def test_ranks_run_equally_many_micro_batches_and_no_slot_is_longer_than_it_must(step: dict[str, Any]):
    lengths, ranks = step["lengths"], step["ranks"]
    try:
        of_ranks = wlb.balance(**step)
    except UserError:
        assert step["max_tokens"] is not None, "without a limit all documents fit"
        return
    assert of_ranks == wlb.balance(**step)
    assert len(of_ranks) == ranks
    number = len(of_ranks[0])
    assert {len(of_rank) for of_rank in of_ranks} == {number}
    assert number % step["parts_multiple_of"] == 0
    parts = [*itertools.chain(*of_ranks)]
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert all(part and part == sorted(part) for part in parts)
    assert step["max_tokens"] is None or all(sum(lengths[i] for i in part) <= step["max_tokens"] for part in parts)
    assert not step["equal_size"] or len({len(part) for part in parts}) == 1
    prices = WORKLOAD.document_seconds(lengths) if step["costs"] is None else np.array(step["costs"])
    loads = np.array([[prices[part].sum() for part in of_rank] for of_rank in of_ranks])
    like_meets_like = -np.sort(-loads, axis=None).reshape(-1, ranks)
    assert loads.max(axis=0).sum() <= like_meets_like.max(axis=1).sum() * (1 + 1e-9) + 1e-300


def test_ranks_wait_for_a_long_document_as_little_as_they_can():
    """The other ranks of its slot are filled up to it, which even micro-batches in any order do not reach."""
    lengths = np.random.default_rng(2).lognormal(6, 0.8, 300).astype(int) + 16
    lengths[7] = lengths.sum() // 20
    loads = np.array(
        [[lengths[part].sum() for part in r] for r in wlb.balance(lengths, 32, ranks=4, workload="tokens")]
    )
    even = np.array([lengths[part].sum() for part in wlb.balance(lengths, 32, workload="tokens")])
    assert loads.shape == (4, 8)
    slots = loads.max(axis=0)
    assert slots.sum() < 1.005 * lengths.sum() / 4 < np.sort(even).reshape(8, 4).max(axis=1).sum()
    assert loads.sum(axis=1).max() < 1.001 * lengths.sum() / 4
    assert slots.argmax() in (3, 4), "a pipeline fills and drains with cheap micro-batches"


def test_costs_stand_in_for_prices():
    """In any unit, of documents whose lengths say nothing; what costs nothing is a document too."""
    costs = [5.0, 0.0, 5.0, 10.0]
    for unit in (1e-9, 1e18):
        parts = wlb.balance([3, 900, 3, 3], 2, costs=[unit * cost for cost in costs])
        assert max(sum(costs[i] for i in part) for part in parts) == 10
    assert wlb.balance([1] * 4, ranks=2, costs=[0.0] * 4) == [[[0, 2]], [[1, 3]]]


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5)), max_size=40),
    st.integers(1, 4),
    st.sampled_from([None, 100]),
    st.sampled_from([None, 1, 4]),
    st.booleans(),
)
def test_rollouts_of_any_lengths_and_number_are_divided_among_ranks(
    rollouts: list[tuple[int, int]], ranks: int, most: int | None, parts: int | None, together: bool
):
    lengths, prompts = [length for length, _ in rollouts], [prompt for _, prompt in rollouts]
    groups = prompts if together else None
    wishes: dict[str, Any] = {"oversize": "alone", "empty": "allowed", "groups": groups}
    try:
        of_ranks = wlb.balance(lengths, parts, most, ranks=ranks, **wishes)
    except UserError:
        assert None not in (parts, most), "enough micro-batches of any size hold all"
        return
    assert len(of_ranks) == ranks
    assert len({len(own) for own in of_ranks}) == 1
    assert sorted(itertools.chain(*itertools.chain(*of_ranks))) == list(range(len(lengths)))
    for part in itertools.chain(*of_ranks):
        held = [lengths[i] for i in part if lengths[i]]
        assert most is None or sum(held) <= most or len(held) == 1
    if together:
        ranks_of = [(prompts[i], rank) for rank, own in enumerate(of_ranks) for i in itertools.chain(*own)]
        assert len(set(ranks_of)) == len(set(prompts))


def test_a_limit_that_only_a_search_can_keep():
    assert sorted(wlb.balance([3, 3, 2, 2, 2], 2, 6)) == [[0, 1], [2, 3, 4]]
    assert fitting_bins([3, 3, 2, 2, 2], 2, 6, None) is not None
    assert fitting_bins([3, 3, 2, 2, 2], 2, 6, None, placements=3) is None
    assert fitting_bins([4, 4, 4], 2, 6, None) is None


def test_the_number_of_parts_is_a_multiple_and_may_be_left_to_the_limit():
    assert len(wlb.balance([5] * 9, 3, parts_multiple_of=2)) == 4
    assert len(wlb.balance([5] * 9, None, 10)) == 5
    assert len(wlb.balance([5] * 9, None, 10, parts_multiple_of=4)) == 8
    assert len(wlb.balance([5] * 9, None, 20, equal_size=True)) == 3
    assert len(wlb.balance([4, 6, 3, 4, 3, 8, 5, 5], None, 10)) == 4  # which only best fit finds


def test_no_documents_are_no_micro_batches_where_empty_ones_are_allowed():
    wishes: dict[str, Any] = {"ranks": 2, "equal_size": True, "empty": "allowed"}
    assert wlb.balance([], **wishes) == wlb.balance([], groups=[], **wishes) == [[[]], [[]]]


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize("lengths", [[6, 6, 6, 6, 6, 6], [100] * 10, [9, 8, 7, 7, 5, 5, 5, 4]])
def test_what_a_refusal_says_would_do_does(lengths: list[int], equal_size: bool):
    with pytest.raises(UserError) as refusal:
        wlb.balance(lengths, 2, max(lengths) + 1, equal_size=equal_size)
    enough = [int(number) for number in re.findall(r"\((\d+) would do\)", str(refusal.value))]
    assert len(wlb.balance(lengths, 2, enough[0], equal_size=equal_size)) == 2
    assert [len(wlb.balance(lengths, number, max(lengths) + 1)) for number in enough[1:]] == enough[1:]
    assert len(enough) == 2 - equal_size


_OF_GROUPS = {"lengths": [4] * 4, "parts": 2, "ranks": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [], "parts": 1}, "0 documents cannot fill 1 parts"),
        ({"lengths": [4, float("nan")], "parts": 1}, r"not float \(document 1 is nan\)"),
        ({"lengths": [4, True], "parts": 1}, r"not bool \(document 1 is True\)"),
        ({"lengths": [[4], [4, 4]], "parts": 1}, r"not list \(document 0 is \[4\]\)"),
        ({"lengths": [4], "parts": 1, "groups": [1]}, "groups needs ranks"),
        ({"lengths": [4, 4], "ranks": 1, "groups": ["a"]}, "for each of 2 documents"),
        ({"lengths": [4] * 3, "ranks": 1, "groups": [1, 1, 2], "equal_size": True}, "of one size, not of 1 to 2"),
        ({"lengths": [2**63, -1], "parts": 1}, "document 1 has -1 tokens"),
        ({"lengths": [2**62, 2**62], "parts": 1}, "have 9223372036854775808 tokens together, over 9223372036854775807"),
        ({"lengths": np.array([2**63], np.uint64), "parts": 1}, "have 9223372036854775808 tokens together"),
        ({"lengths": [4], "parts": 1, "workload": "7b"}, r"'7b' has no prices; give make_workload\(\"7b\"\)"),
        ({"lengths": [4], "parts": 0}, "parts = 0 is not"),
        ({"lengths": [4], "parts": 1, "max_tokens": -1}, "max_tokens = -1 is not"),
        ({"lengths": [4], "parts": 1, "parts_multiple_of": True}, "parts_multiple_of = True is not"),
        ({"lengths": [4], "parts": 2}, "1 documents cannot fill 2 parts"),
        ({"lengths": [4], "parts": None}, "give parts, max_tokens or ranks"),
        ({"lengths": [4, 4, 4], "ranks": 2, "max_tokens": 4}, "3 documents cannot fill 4 parts"),
        ({"lengths": [4, 4], "parts": 1, "costs": [1.0]}, "one number for each of 2 documents"),
        ({"lengths": [4, 4], "parts": 1, "costs": [[1], [1, 2]]}, "one number for each of 2 documents"),
        ({"lengths": [4, 4], "parts": 1, "costs": [1.0, -2.0]}, "document 1 costs -2.0"),
        ({"lengths": [4], "parts": 1, "costs": [1.0], "workload": "tokens"}, "give one of them"),
        ({"lengths": [4, 4, 4], "parts": 2, "equal_size": True}, "3 documents are not a multiple of 2 parts"),
        ({"lengths": [4, 9], "parts": 2, "max_tokens": 8}, "document 1 has 9 tokens, over max_tokens = 8"),
        ({"lengths": [6, 6, 6], "parts": 2, "max_tokens": 10}, r"max_tokens \(12 would do\) or parts \(3 would do\)"),
        ({"lengths": [9] * 9, "parts": 1, "max_tokens": 27}, r"81 tokens .* \(81 would do\) or parts \(3 would do\)"),
        ({"lengths": [9, 5, 5], "parts": 1, "max_tokens": 8, "oversize": "alone"}, r"raise parts \(3 would do\)$"),
        (_OF_GROUPS | {"groups": [0, 0, 1, 1], "max_tokens": 7}, r"rank 0 of 2 \(parts count per rank\): .* 8"),
        (_OF_GROUPS | {"groups": [0] * 4}, r'1 groups cannot fill 2 ranks; give more, or set empty = "allowed"$'),
        (_OF_GROUPS | {"groups": [0, 1, 2, 0], "equal_size": True}, "groups of one size, not of 1 to 2"),
        (_OF_GROUPS | {"groups": [None, 0, 1, 1]}, "int or str, for each of 4 documents"),
        (_OF_GROUPS | {"groups": [[0, 1], [0], [1], [1]]}, "int or str, for each of 4 documents"),
        ({"lengths": [], "ranks": 2, "groups": [], "equal_size": True}, "0 groups cannot fill 2 ranks"),
        ({"lengths": [4], "parts": 2, "equal_size": True, "empty": "allowed"}, '"allowed" and equal_size = False'),
        ({"lengths": [4], "parts": 1, "oversize": "Alone"}, 'oversize = \'Alone\' is neither "error" nor "alone"'),
        ({"lengths": [4], "parts": 2, "empty": "allow"}, 'empty = \'allow\' is neither "error" nor "allowed"'),
        ({"lengths": [5, 5, 5], "parts": 2, "costs": [1e308] * 3}, "costs add up to more than a float holds"),
    ],
)
def test_what_cannot_be_is_one_line_with_a_remedy(arguments: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message) as refusal:
        wlb.balance(**arguments)
    assert "\n" not in str(refusal.value)


def test_packing_and_balance_need_numpy_alone():
    """In an interpreter that can import the standard library, NumPy and this package, and nothing else."""
    code = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root not in {"numpy", "wlb", *sys.stdlib_module_names, *sys.builtin_module_names}:
            raise ImportError(f"{name} was to be imported")

import numpy
sys.meta_path.insert(0, Nothing())
import wlb.packing, wlb.packing.balance, wlb.packing.plan
from wlb import balance, StepPlan, Segment
print(balance([9, 5, 4], 2), balance([9_000, 5_000, 4_001], 2, workload="tokens"))
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.stdout == "[[0], [1, 2]] [[0], [1, 2]]\n", finished.stderr
