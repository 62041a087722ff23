"""Micro-batches, workloads and a dense picture of a plan that the tests of this room share."""

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from hypothesis import strategies as st

from tests.workload.profiles import analytic_profile
from wlb.documents.synthetic import sample_lengths
from wlb.sharding import ShardPlan
from wlb.workload import Costs, make_workload, model_shape

WINDOW = 131_072

WORKLOADS: dict[str, Costs] = {
    "7b": make_workload("7b", "h100"),
    "70b, tp 8": make_workload("70b", "a100", tp=8),
    "tiny": make_workload("tiny", "cpu"),
    "window 1": make_workload(replace(model_shape("7b"), sliding_window=1), "h100"),
    "profile": make_workload("tiny", "cpu", profile=analytic_profile(model_shape("tiny"))),
}

small_lengths = st.one_of(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.builds(lambda length, count: [length] * count, st.integers(1, 9), st.integers(1, 20)),
    st.builds(lambda long, short: [long, *short], st.integers(100, 200), st.lists(st.integers(1, 9), max_size=9)),
)
long_lengths = st.one_of(
    st.lists(st.integers(1, 131_072), min_size=1, max_size=60),
    st.builds(lambda length, count: [length] * count, st.integers(1, 20_000), st.integers(1, 80)),
    st.builds(lambda long, short: [*short, long], st.integers(50_000, 10**6), st.lists(st.integers(1, 500))),
)
cp_sizes = st.integers(1, 9)


def sampled_micro_batches(count: int, seed: int = 0) -> list[list[int]]:
    """``count`` windows of synthetic documents in a row, cut where the window ends."""
    ends = set(accumulate(sample_lengths(100 * count, WINDOW, seed).tolist()))
    cuts = sorted(ends | set(range(0, WINDOW * (count + 1), WINDOW)))
    windows: list[list[int]] = [[] for _ in range(count)]
    for left, right in pairwise(cuts):
        if left < WINDOW * count:
            windows[left // WINDOW].append(right - left)
    return windows


def attended_by_rank(plan: ShardPlan) -> np.ndarray:
    """Whether rank r computes query i against key j, at [r, i, j], drawn from the pieces one token after another."""
    starts = [0, *accumulate(plan.segment_lengths)]
    attended = np.zeros((plan.cp_size, plan.tokens, plan.tokens), dtype=int)
    for rank, table in enumerate(plan.pieces):
        for segment, start, stop in table.tolist():
            for query in range(start, stop):
                attended[rank, starts[segment] + query, starts[segment] : starts[segment] + query + 1] += 1
    return attended


def causal_mask(lengths: tuple[int, ...]) -> np.ndarray:
    """Query i attends key j of the same document that does not come after it."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    return np.asarray((document[:, None] == document) & np.tri(len(document), dtype=bool))
