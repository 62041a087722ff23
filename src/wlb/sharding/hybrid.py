"""Hybrid sharding: documents stay whole on one rank where they fit, and only the others are cut.

Cutting a document balances the ranks but moves its keys and values between them; a whole document moves nothing.
For a permitted level of seconds per rank, documents are assigned whole, most expensive first, to the rank with the
least work. One that would lift its rank above the level is cut: the longest because they are more than a rank's share,
and towards the end a few short ones that no longer fit. A higher level cuts less and balances less; several are tried.

Cut documents flow into what the whole ones left of the ranks, one document after another, until all ranks stand at one
level. Of the ranks that share a document

- one takes its tail, whose keys and values no other rank needs, and of its head only what the others have no space for;
- the others share what lies between, each a head chunk and the tail chunk that mirrors it, taken from outside in. The
  pair's mean query sees the same keys whatever the pair's size, so any share costs in proportion to its tokens.

Equal shares of one document would be per-document sharding; unequal ones fill uneven gaps with few cuts.
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

MEMORY_FACTOR = 1.25  # tokens a rank may hold, over its even share
TOLERANCE = 0.01  # of the fastest group's seconds, given up for gathering less
LEVELS = (1.0, 1.02, 1.04, 1.08)  # of seconds, over perfectly even ranks
# Tokens, over an even share. Ranks of uneven tokens are even in forward and backward together, but not in each of them;
# ranks of even tokens are, and cut more for it.
EVEN_TOKENS = 1.01

_CUTS = 128  # places between which the cut of a document is interpolated
_PLACES = np.arange(_CUTS + 1)

Share = tuple[int, float]  # rank and seconds


def hybrid(micro_batches: MicroBatches, cp_size: int, workload: Costs) -> Pieces:
    """Cut as few documents as make the group fastest.

    Of the plans within ``TOLERANCE`` of the fastest it takes the one that gathers the fewest tokens, because gathered
    keys and values also cost memory, and bandwidth that others would use; never one slower than adaptive sharding. No
    rank holds more than ``MEMORY_FACTOR`` times its even share of the tokens, rounded up.
    """
    static, levelled = static_candidates(micro_batches, cp_size), levelled_candidates(micro_batches, cp_size, workload)
    candidates = joined([static, levelled])
    seconds, gathered = price(candidates, workload)
    adaptive = seconds[: len(static.micro_batch)].reshape(2, -1).min(axis=0)
    fastest = adaptive.copy()
    np.minimum.at(fastest, candidates.micro_batch, seconds)
    too_slow = seconds > np.minimum((1 + TOLERANCE) * fastest, adaptive)[candidates.micro_batch]
    return best_pieces(candidates, seconds, gathered, too_slow)


def levelled_candidates(
    micro_batches: MicroBatches, cp_size: int, workload: Costs, memory_factor: float = MEMORY_FACTOR
) -> Candidates:
    """The levelled plans of every micro-batch, with up to ``memory_factor`` even shares of the tokens on a rank."""
    plans = (
        (index, *plan)
        for index, lengths in enumerate(micro_batches.each)
        for plan in _levelled(lengths, cp_size, workload, memory_factor)
    )
    return candidates_of(plans, micro_batches, cp_size)


def _levelled(
    lengths: Integers, cp_size: int, workload: Costs, memory_factor: float
) -> Iterator[tuple[Integers, Table]]:
    """Ranks and pieces (segment, start, stop), empty ones among them, for every level that makes another plan.

    With uneven tokens, where these are allowed; and for the lowest level with even ones.
    """
    total = int(lengths.sum())
    token_seconds = float(workload.linear_seconds(total)) / total
    seconds = workload.attention_seconds(lengths) + token_seconds * lengths
    dearest_first = np.argsort(-seconds, kind="stable")
    sizes, prices = lengths[dearest_first].tolist(), seconds[dearest_first].tolist()
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
            cut, whole = dearest_first[owners < 0], dearest_first[owners >= 0]
            ranks, rows = owners[owners >= 0], np.stack([whole, np.zeros_like(whole), lengths[whole]], axis=1)
            if len(cut):
                filled = _fill_ranks(cut.tolist(), lengths, np.array(loads), np.array(space), token_seconds, workload)
                ranks, rows = np.concatenate([filled[0], ranks]), np.concatenate([filled[1], rows])
            if np.bincount(ranks, rows[:, 2] - rows[:, 1]).max() <= most_tokens:
                yield ranks, rows
            if len(cut) == 0:
                break  # a higher level is only less even


def _fill_ranks(
    cut: list[int], lengths: Integers, load_seconds: Seconds, space: Integers, token_seconds: float, workload: Costs
) -> tuple[list[int], Table]:
    """Share the ``cut`` segments among ranks that hold ``load_seconds`` and have ``space`` tokens free.

    ``lengths`` (tokens) are those of all segments; a token costs ``token_seconds`` beside its attention. Returns the
    rank of every piece and the pieces (segment, start, stop), empty ones among them. Space is aimed at, not guaranteed.
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
    # Ranks take as much, at most their space, as lets all rise to the lowest common level.
    most = space * (seconds.sum() / sizes.sum())
    levels = np.sort(np.concatenate([load_seconds, load_seconds + most]))
    volumes = np.clip(levels[:, None] - load_seconds, 0.0, most).sum(axis=1)
    gaps = np.clip(np.interp(seconds.sum(), volumes, levels) - load_seconds, 0.0, most)
    # The longest documents have the most expensive tokens: they go to ranks that have more seconds left than space.
    tightness = gaps / np.maximum(space, 1)
    filled = np.flatnonzero((gaps > 0) | (gaps == gaps.max()))
    ranks = filled[np.argsort(-tightness[filled], kind="stable")].tolist()
    rank_ends = np.cumsum(gaps[ranks]).tolist()
    document_ends = np.cumsum(seconds).tolist()
    rank_ends[-1] = document_ends[-1]  # whatever rounding made of it
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
