"""The heaps place as a plain search would."""

from hypothesis import given
from hypothesis import strategies as st

from tests.packing.streams import SETTINGS, WORKLOADS
from wlb.documents.segments import Segment
from wlb.packing.carrying import OpenMicroBatches
from wlb.packing.packer import Pending


def pending(lengths, workload="polynomial"):
    seconds = WORKLOADS[workload].document_seconds(lengths).tolist()
    return [Pending(n, s, 0, Segment(i, 0, n)) for i, (n, s) in enumerate(zip(lengths, seconds, strict=True))]


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
    items = sorted(items, key=lambda item: -item.length) if sort else items
    filled = OpenMicroBatches(micro_batches, capacity)
    half = len(items) // 2
    left_over = filled.place(items[:half]) + filled.place(items[half:])
    assert (filled.members, left_over) == placed_plainly(items, micro_batches, capacity)
    assert filled.tokens == [sum(item.length for item in members) for members in filled.members]
