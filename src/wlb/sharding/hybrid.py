"""Hybrid sharding: documents that fit stay whole on one rank, and only the others are cut.

Cutting a document balances the ranks but sends its keys and values between them; a whole document sends nothing. For a
given limit of seconds per rank, documents are assigned whole, most expensive first, to the rank with the least work. A
document that would take its rank over the limit is cut: the longest ones, which exceed the share of a rank, and towards
the end a few short ones that no longer fit. A higher limit cuts less and balances less; several limits are tried.

Cut documents fill the gaps of the ranks, one document after another, until all ranks have equal work. Of the ranks that
share a document,

- one takes the tail, whose keys and values no other rank needs, and as much of the head as the others have no room for;
- the others share the middle, from outside in: each takes a head chunk and the tail chunk that mirrors it. The mean
  query of such a pair attends the same number of keys whatever the size of the pair, so its cost is proportional to its
  tokens.

Equal shares of one document would be per-document sharding; unequal shares fill uneven gaps with few cuts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from wlb.lightest import into_lightest
from wlb.sharding.adaptive import Candidates, best_pieces, candidates_of, joined, price, static_candidates
from wlb.sharding.pieces import Integers, MicroBatches, Pieces
from wlb.sharding.plan import Table
from wlb.workload import Costs
from wlb.workload.base import Seconds

MEMORY_FACTOR = 1.25  # tokens that a rank may hold, over its even share
TOLERANCE = 0.01  # a plan may be this much slower than the fastest if it gathers less
LEVELS = (1.0, 1.02, 1.04, 1.08)  # of seconds, over perfectly even ranks
# Tokens over an even share. Ranks with uneven tokens are balanced in forward plus backward, but not in each of them;
# ranks with even tokens are balanced in each, but cut more documents.
EVEN_TOKENS = 1.01

_CUTS = 128  # places at which attention is priced to interpolate a cut
_PLACES = np.arange(_CUTS + 1)

Share = tuple[int, float]  # rank and seconds


def hybrid(micro_batches: MicroBatches, cp_size: int, workload: Costs) -> Pieces:
    """Cut only as many documents as make the group fastest.

    Of the plans within ``TOLERANCE`` of the fastest it takes the one that gathers the fewest tokens, because gathered
    keys and values also cost memory and bandwidth. It never takes a plan slower than adaptive sharding. No rank holds
    more than ``MEMORY_FACTOR`` times its even share of tokens, rounded up.
    """
    static, uneven = static_candidates(micro_batches, cp_size), hybrid_candidates(micro_batches, cp_size, workload)
    candidates = joined([static, uneven])
    seconds, gathered = price(candidates, workload)
    adaptive = seconds[: len(static.micro_batch)].reshape(2, -1).min(axis=0)
    fastest = adaptive.copy()
    np.minimum.at(fastest, candidates.micro_batch, seconds)
    too_slow = seconds > np.minimum((1 + TOLERANCE) * fastest, adaptive)[candidates.micro_batch]
    return best_pieces(candidates, seconds, gathered, too_slow)


def hybrid_candidates(
    micro_batches: MicroBatches, cp_size: int, workload: Costs, memory_factor: float = MEMORY_FACTOR
) -> Candidates:
    """The hybrid plans of every micro-batch, with up to ``memory_factor`` even shares of tokens on a rank."""
    plans = (
        (index, *plan)
        for index, lengths in enumerate(micro_batches.each)
        for plan in _hybrid_plans(lengths, cp_size, workload, memory_factor)
    )
    return candidates_of(plans, micro_batches, cp_size)


def _hybrid_plans(
    lengths: Integers, cp_size: int, workload: Costs, memory_factor: float
) -> Iterator[tuple[Integers, Table]]:
    """Ranks and pieces (segment, start, stop), some empty, for every limit of seconds that gives a different plan.

    The lowest limit with even tokens, and all limits with uneven tokens if these are allowed.
    """
    total = int(lengths.sum())
    token_seconds = float(workload.linear_seconds(total)) / total
    seconds = workload.attention_seconds(lengths) + token_seconds * lengths
    costliest_first = np.argsort(-seconds, kind="stable")
    sizes, prices = lengths[costliest_first].tolist(), seconds[costliest_first].tolist()
    even = float(seconds.sum()) / cp_size
    most_tokens = max(int(memory_factor * total / cp_size), -(-total // cp_size))
    aims = [(int(EVEN_TOKENS * total / cp_size), LEVELS[:1]), (most_tokens, LEVELS)]
    for most_aimed_at, levels in aims if memory_factor > EVEN_TOKENS else aims[:1]:
        makes_a_difference = 0.0
        for level in levels:
            if level * even < makes_a_difference:
                continue
            loads, space = [0.0] * cp_size, [most_aimed_at] * cp_size
            found, makes_a_difference = into_lightest(sizes, prices, loads, space, level * even)
            owners = np.array(found)
            cut, whole = costliest_first[owners < 0], costliest_first[owners >= 0]
            ranks, rows = owners[owners >= 0], np.stack([whole, np.zeros_like(whole), lengths[whole]], axis=1)
            if len(cut):
                filled = _fill_ranks(cut.tolist(), lengths, np.array(loads), np.array(space), token_seconds, workload)
                ranks, rows = np.concatenate([filled[0], ranks]), np.concatenate([filled[1], rows])
            if np.bincount(ranks, rows[:, 2] - rows[:, 1]).max() <= most_tokens:
                yield ranks, rows
            if len(cut) == 0:
                break  # a higher limit is only less even


def _fill_ranks(
    cut: list[int], lengths: Integers, load_seconds: Seconds, space: Integers, token_seconds: float, workload: Costs
) -> tuple[list[int], Table]:
    """Share the ``cut`` segments among ranks that already hold ``load_seconds`` and have room for ``space`` tokens.

    ``lengths`` (tokens) are those of all segments; a token costs ``token_seconds`` beside its attention. Returns the
    rank of every piece and the pieces (segment, start, stop), some empty. ``space`` is a goal, not guaranteed.
    """
    segments = sorted(cut, key=lambda segment: (-int(lengths[segment]), segment))
    sizes = lengths[segments]
    seconds = workload.attention_seconds(sizes) + token_seconds * sizes
    left: list[int] = space.tolist()
    ranks: list[int] = []
    rows: list[tuple[int, int, int]] = []
    for segment, shares in zip(segments, _pour(seconds, sizes, load_seconds, space), strict=True):
        for rank, start, stop in _cut(int(lengths[segment]), shares, left, token_seconds, workload):
            ranks.append(rank)
            rows.append((segment, start, stop))
            left[rank] -= stop - start
    return ranks, np.array(rows, dtype=np.int64)


def _pour(seconds: Seconds, sizes: Integers, load_seconds: Seconds, space: Integers) -> list[list[Share]]:
    """The shares of every document, longest first, each spanning as few ranks as it can."""
    # Fill all ranks to the lowest common level, each at most by its space.
    most = space * (seconds.sum() / sizes.sum())
    levels = np.sort(np.concatenate([load_seconds, load_seconds + most]))
    volumes = np.clip(levels[:, None] - load_seconds, 0.0, most).sum(axis=1)
    gaps = np.clip(np.interp(seconds.sum(), volumes, levels) - load_seconds, 0.0, most)
    # The longest documents have the most expensive tokens: they go to ranks short of space rather than of seconds.
    tightness = gaps / np.maximum(space, 1)
    filled = np.flatnonzero((gaps > 0) | (gaps == gaps.max()))
    ranks = filled[np.argsort(-tightness[filled], kind="stable")].tolist()
    rank_ends = np.cumsum(gaps[ranks]).tolist()
    document_ends = np.cumsum(seconds).tolist()
    rank_ends[-1] = document_ends[-1]  # despite rounding
    shares: list[list[Share]] = []
    current, poured = 0, 0.0
    for end in document_ends:
        shares.append([])
        while poured < end:
            level = min(end, rank_ends[current])
            if level > poured:
                shares[-1].append((ranks[current], level - poured))
                poured = level
            if poured >= rank_ends[current] and poured < document_ends[-1]:
                current += 1
    return shares


def _cut(
    length: int, shares: list[Share], space: list[int], token_seconds: float, workload: Costs
) -> list[tuple[int, int, int]]:
    """Pieces (rank, start, stop) of one document: the largest share takes the tail, the others nested pairs."""
    outer, _ = max(shares, key=lambda share: share[1])
    inner = [share for share in shares if share[0] != outer]
    if not inner:
        return [(outer, 0, length)]
    inner_seconds = sum(seconds for _, seconds in inner)
    most = max(0, min([int(space[rank] * (inner_seconds / seconds)) for rank, seconds in inner]))
    stops = _PLACES * length // _CUTS
    starts = np.maximum(stops - most, 0)
    until_stop, until_start = workload.attention_seconds(np.array((stops, starts)))
    stop = round(float(np.interp(inner_seconds, until_stop - until_start + token_seconds * (stops - starts), stops)))
    start = max(stop - most, 0)
    pieces = [(outer, 0, start), (outer, stop, length)]
    head, tail, done = start, stop, 0.0
    for rank, seconds in inner:
        done += seconds
        taken = round((stop - start) * done / inner_seconds)
        next_head, next_tail = start + (taken + 1) // 2, stop - taken // 2
        pieces += [(rank, head, next_head), (rank, next_tail, tail)]
        head, tail = next_head, next_tail
    return pieces
