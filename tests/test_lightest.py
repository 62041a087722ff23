"""The lightest bin with room, against a plain search."""

import math

from hypothesis import given
from hypothesis import strategies as st

from wlb.lightest import into_lightest

documents = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=30)


def placed_plainly(lengths, prices, bins, room, limit):
    owners, loads, rooms = [], [0.0] * bins, [room] * bins
    for length, price in zip(lengths, prices, strict=True):
        open_bins = [index for index in range(bins) if rooms[index] >= length]
        lightest = min(open_bins, key=lambda index: (loads[index], index), default=-1)
        if lightest >= 0 and loads[lightest] + price > limit:
            lightest = -1
        if lightest >= 0:
            loads[lightest] += price
            rooms[lightest] -= length
        owners.append(lightest)
    return owners, loads, rooms


@given(documents, st.integers(1, 5), st.sampled_from([*range(1, 31), 300]), st.sampled_from([3.0, 8.0, 20.0, math.inf]))
def test_places_as_a_plain_search_does(some, bins, room, limit):
    lengths, prices = [length for length, _ in some], [float(price) for _, price in some]
    loads, rooms = [0.0] * bins, [room] * bins
    owners = into_lightest(lengths, prices, loads, rooms, limit)
    assert (owners.tolist(), loads, rooms) == placed_plainly(lengths, prices, bins, room, limit)
