"""The heaps place as a plain search would, and near the optimum."""

from hypothesis import given
from hypothesis import strategies as st

from tests.packing.streams import SETTINGS, WORKLOADS
from wlb.documents.segments import Segment
from wlb.packing.carrying import OpenMicroBatches, longest_first
from wlb.packing.exact import solve
from wlb.packing.packer import Pending
from wlb.packing.registry import make_packer


def pending(lengths, workload="polynomial"):
    seconds = WORKLOADS[workload].document_seconds(lengths).tolist()
    return [Pending(n, s, 0, Segment(i, 0, n), n) for i, (n, s) in enumerate(zip(lengths, seconds, strict=True))]


def placed_plainly(items, micro_batches, capacity):
    """Algorithm 1, lines 10 to 20, as printed: lightest, else shortest, else left over."""
    members: list[list[Pending]] = [[] for _ in range(micro_batches)]
    seconds, tokens, left_over = [0.0] * micro_batches, [0] * micro_batches, []
    for item in items:
        lightest = seconds.index(min(seconds))
        shortest = tokens.index(min(tokens))
        fits = [index for index in (lightest, shortest) if tokens[index] + item.length <= capacity]
        if not fits:
            left_over.append(item)
            continue
        members[fits[0]].append(item)
        seconds[fits[0]] += item.seconds
        tokens[fits[0]] += item.length
    return members, left_over


@SETTINGS
@given(
    st.lists(st.integers(1, 40), max_size=60),
    st.integers(1, 9),
    st.integers(40, 120),
    st.sampled_from(["polynomial", "square", "7b"]),
    st.booleans(),
)
def test_heaps_place_as_a_plain_search_does(lengths, micro_batches, capacity, workload, sort):
    items = pending(lengths, workload)
    items = longest_first(items) if sort else items
    filled = OpenMicroBatches(micro_batches, capacity)
    half = len(items) // 2
    left_over = filled.place(items[:half]) + filled.place(items[half:])
    assert (filled.members, left_over) == placed_plainly(items, micro_batches, capacity)
    assert filled.tokens == [sum(item.length for item in members) for members in filled.members]


def test_both_heaps_know_what_was_put():
    filled = OpenMicroBatches(2, 10)
    long, *short, too_long, put, last, beside = pending([8, *[1] * 9, 7, 1, 1, 1], "square")
    assert filled.place([long, *short, too_long]) == [too_long]  # which asks for the shortest micro-batch
    filled.put(put, 0)
    assert filled.place([last, beside]) == []
    assert filled.members == [[long, put, beside], [*short, last]]


@SETTINGS
@given(st.lists(st.integers(1, 9), max_size=12), st.lists(st.integers(0, 4), min_size=12, max_size=12))
def test_filling_empty_micro_batches_keeps_every_document(lengths, places):
    filled = OpenMicroBatches(5, 1000)
    items = pending(lengths)
    for item, index in zip(items, places, strict=False):
        filled.put(item, index)
    before = max(filled.seconds)
    filled.fill_empty()
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
