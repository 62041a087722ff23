"""Shard plans that no strategy would make."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from wlb.sharding.pieces import merged, rank_tables
from wlb.sharding.plan import ShardPlan


def random_plan(lengths: Sequence[int], cp_size: int, owners: int, seed: int) -> ShardPlan:
    """Random cuts dealt at random to the last ``owners`` ranks; the others hold nothing."""
    random = np.random.default_rng(seed)
    rows = []
    for segment, length in enumerate(lengths):
        cuts = np.unique([0, length, *random.integers(0, length + 1, random.integers(0, 8))])
        rows += [(segment, start, stop) for start, stop in pairwise(cuts)]
    table = np.array(rows, dtype=np.int64)
    ranks = cp_size - 1 - random.integers(0, owners, len(table))
    return ShardPlan("random", tuple(lengths), rank_tables(merged(ranks, *table.T), cp_size))
