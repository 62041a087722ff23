"""Libra: sequences are dealt longest first into pools, whose ranks share attention in tiles.

Source: arXiv 2607.23250, its abstract and second-hand accounts; no code is published. ``POOL`` sequences of a global
batch at a time make a pool; pools are even in F = sum l^2, and nothing moves to another step. Inside a pool, tiles of a
block of queries and a group of heads go, heads first, to the rank under a soft cap that adds the fewest bytes.

Assumed: a cap of 2%; four chunks of heads; tiles of 8,192 queries. Assumed in its favour: tokens even inside a pool.
"""

import math

import numpy as np
from numpy.typing import NDArray

from wlb_studies.policies.filling import Integers, power_of_two
from wlb_studies.policies.plan import MovedPlan, Ranks, Tasks, even_pools, joined, laid_in_a_row

POOL = 8  # sequences
SOFT_CAP = 1.02  # of a rank's attention, over the pool's mean; assumed
BLOCK = 8192  # queries of a tile at most; assumed


def pools(lengths: Integers, ranks: Ranks) -> MovedPlan:
    """Every pool of sequences runs on as many ranks as its tokens need; pools hold whole documents."""
    size = min(ranks.count, POOL * power_of_two(ranks.needed(ranks.window)))
    numbers, filled = even_pools(lengths, ranks, size)
    homes = [laid_in_a_row(documents, lengths, size, first_lane) for first_lane, documents in filled]
    works = [_tiled(home, size, first_lane, ranks) for home, (first_lane, _) in zip(homes, filled, strict=True)]
    return MovedPlan(lengths, numbers, joined(homes), joined(works), hidden_by="heads")


def _tiled(home: Tasks, size: int, first_lane: int, ranks: Ranks) -> Tasks:
    """Place a pool's tiles with their queries as far as the cap allows, else where they add the fewest bytes."""
    job = ranks.job
    groups = math.gcd(job.shape.kv_heads // job.layout.tp, size) if job.shape.kv_heads >= job.layout.tp else 1
    tiles = _tiles(home, groups)
    pairs = tiles.pairs
    cap = SOFT_CAP * float(pairs.sum()) / size
    loads = np.zeros(size)
    owner = tiles.lane - first_lane
    placed = owner.copy()
    resident: dict[tuple[int, int], NDArray[np.int64]] = {}  # last key of a document's head group on each rank
    ratio = job.shape.heads / job.shape.kv_heads  # bytes of a query and its output, over those of a key and its value
    for tile in np.argsort(-pairs, kind="stable").tolist():
        mine = int(owner[tile])
        place = (int(tiles.document[tile]), tile % groups)
        keys = resident.setdefault(place, np.zeros(size, np.int64))
        if loads[mine] + pairs[tile] <= cap:
            rank = mine
        else:
            length, stop = int(tiles.stop[tile] - tiles.start[tile]), int(tiles.stop[tile])
            added = np.maximum(0, stop - keys) + ratio * length
            added[mine] = max(0, stop - int(keys[mine]))
            fits = loads + pairs[tile] <= cap
            rank = int(np.where(fits, added, np.inf).argmin()) if fits.any() else int(loads.argmin())
        placed[tile] = rank
        loads[rank] += pairs[tile]
        keys[rank] = max(int(keys[rank]), int(tiles.stop[tile]))
    return tiles._replace(lane=first_lane + placed)


def _tiles(home: Tasks, groups: int) -> Tasks:
    """Home pieces in blocks of queries, each once for every group of heads, which follow each other."""
    counts = -(-(home.stop - home.start) // BLOCK)
    piece = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = home.start[piece] + index * BLOCK
    stop = np.minimum(start + BLOCK, home.stop[piece])
    tiles = Tasks(home.lane[piece], home.document[piece], start, stop, np.full(len(piece), 1 / groups))
    return tiles.at(np.repeat(np.arange(len(piece)), groups))
