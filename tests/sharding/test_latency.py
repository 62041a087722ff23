"""What a group takes, against ranks that run layer after layer and wait where ``wlb.attention`` makes them."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.limits import examples
from wlb.documents.segments import Segment
from wlb.packing.plan import MicroBatch
from wlb.sharding.latency import Priced, attending_again, attending_seconds
from wlb.sharding.plan import PART_CUTS
from wlb.simulate import simulated_job

LAYERS = 200
seconds = st.floats(0, 10)


class RankSeconds(NamedTuple):
    """What ranks compute in one layer."""

    own: NDArray[np.float64]  # attention among the rank's own tokens
    received: NDArray[np.float64]  # attention over keys of other ranks
    rest: NDArray[np.float64]


Group = tuple[RankSeconds, NDArray[np.float64], NDArray[np.int64]]


@st.composite
def groups(draw: st.DrawFn, most: int = 6) -> Group:
    """What the ranks of a group compute in one layer, how long their messages take, and in how many parts they come."""
    ranks = draw(st.integers(1, most))
    columns = [np.array(draw(st.lists(seconds, min_size=ranks, max_size=ranks))) for _ in range(4)]
    return RankSeconds(*columns[:3]), columns[3], np.array(draw(st.integers(1, 4)))


def forward_seconds(ranks: RankSeconds, exchange: NDArray[np.float64], parts: NDArray[np.int64]) -> float:
    return float((attending_seconds(ranks.own, ranks.received, exchange, parts) + ranks.rest).max())


def backward_seconds(
    ranks: RankSeconds, exchange: NDArray[np.float64], parts: NDArray[np.int64], *, kept: bool
) -> float:
    if kept:
        return forward_seconds(ranks, exchange, parts)
    return float((attending_again(ranks.own, ranks.received, exchange, parts, ranks.rest) + ranks.rest).max())


def _arrivals(begin: float, seconds_each: float, parts: int) -> list[float]:
    return [begin + seconds_each * cut for cut in PART_CUTS[parts][1:]]


def _shares(parts: int) -> list[float]:
    return [end - begin for begin, end in pairwise(PART_CUTS[parts])]


def _forward(ranks: RankSeconds, exchange: NDArray[np.float64], parts: int) -> float:
    now = np.zeros(len(ranks.own))
    for _ in range(LAYERS):
        begin = now.max()  # the slowest sends last
        for rank in range(len(now)):
            now[rank] += ranks.own[rank]
            for arrival, share in zip(_arrivals(begin, exchange[rank], parts), _shares(parts), strict=True):
                now[rank] = max(now[rank], arrival if exchange[rank] else 0.0) + ranks.received[rank] * share
        now += ranks.rest
    return float(now.max()) / LAYERS


def _backward_of_equal_ranks(ranks: RankSeconds, exchange: float, parts: int, *, kept: bool) -> float:
    own, received, rest = (float(column[0]) for column in ranks)
    now = 0.0
    for _ in range(LAYERS):
        # What was not kept is sent while the layer above is computed, and gradients leave when all of it is here.
        arrivals = [now] * parts if kept else _arrivals(now - rest, exchange, parts)
        home = max(now, arrivals[-1])
        for arrival, share in zip(arrivals, _shares(parts), strict=True):
            now = max(now, arrival) + received * share
            home = max(home, now) + exchange * share
        now = max(now + own, home if exchange else 0.0) + rest
    return now / LAYERS


@settings(deadline=None, max_examples=examples(30))
@given(groups())
def test_many_forwards_take_what_one_does_times_their_number(group):
    ranks, exchange, parts = group
    slack = 4 * (exchange.max() + sum(part.max() for part in ranks)) / LAYERS + 1e-9  # filling and draining
    assert _forward(ranks, exchange, int(parts)) == pytest.approx(forward_seconds(ranks, exchange, parts), abs=slack)


@settings(deadline=None, max_examples=examples(30))
@given(groups(most=1), st.booleans())
def test_many_backwards_take_what_one_does_times_their_number(group, kept):
    ranks, exchange, parts = group
    predicted = backward_seconds(ranks, exchange, parts, kept=kept)
    simulated = _backward_of_equal_ranks(ranks, float(exchange[0]), int(parts), kept=kept)
    assert simulated == pytest.approx(predicted, rel=1e-9)


@settings(deadline=None, max_examples=examples(30))
@given(groups())
def test_waiting_is_bounded_by_what_travels(group):
    ranks, exchange, parts = group
    computing = (ranks.own + ranks.received + ranks.rest).max()
    kept, again = (backward_seconds(ranks, exchange, parts, kept=keeps) for keeps in (True, False))
    assert computing - 1e-9 <= forward_seconds(ranks, exchange, parts) <= computing + exchange.max() + 1e-9
    assert computing - 1e-9 <= kept <= again + 1e-9
    assert again <= kept + 2 * exchange.max() + 1e-9


@pytest.mark.parametrize(("recomputing", "launches"), [("none", 1), ("keep_attention", 1.5), ("full", 1.5)])
def test_a_small_micro_batch_waits_until_the_host_has_launched_its_kernels_and_again_to_recompute(
    recomputing, launches
):
    one = simulated_job("550m", 4096, activation_checkpointing=recomputing)
    priced = Priced.of(one.sharded([MicroBatch((Segment(0, 0, 64),), 0.0)]), one.costs).blocks
    assert priced.forward == one.costs.host_seconds(64, "forward")
    assert priced.backward == pytest.approx(launches * one.costs.host_seconds(64, "backward"))
