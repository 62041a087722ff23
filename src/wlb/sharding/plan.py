"""A shard plan: which rank holds which tokens of a micro-batch, as plain data.

A micro-batch is a sequence of segments. Context parallelism gives every rank some *pieces* of them: queries ``start``
to ``stop`` of a segment, which attend its keys 0 to ``stop``. If all pieces of a segment lie on one rank, it needs no
exchange; otherwise ranks receive the keys and values that they attend. The pieces cover every token exactly once, so a
plan is a permutation of the micro-batch, and attention over it is exact.

The first segment may be a slice of a longer one, whose other slices are in other micro-batches. Its queries then also
attend the ``earlier`` tokens before it. Later slices attend its keys on every rank, so all ranks receive them.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

Table = NDArray[np.int64]

# Where parts begin and end, by the number of parts. Keys and values arrive in parts; each is attended while the next is
# on its way. The first and last are small, because nothing hides the first, nor the gradients of the last. The cuts are
# symmetric, and binary fractions, so they are exact.
PART_CUTS = {1: (0.0, 1.0), 2: (0.0, 0.5, 1.0), 3: (0.0, 0.25, 0.75, 1.0), 4: (0.0, 0.125, 0.5, 0.875, 1.0)}
MOST_PARTS = max(PART_CUTS)


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """The pieces of every context-parallel rank.

    ``pieces[r]`` has shape (pieces, 3): segment, start and stop, in the order in which rank r holds their tokens,
    the order of the micro-batch. ``segment_lengths`` (tokens) are in packed order. ``earlier`` counts the tokens before
    the first segment if that is a slice; else it is None.
    """

    strategy: str
    segment_lengths: tuple[int, ...]
    pieces: tuple[Table, ...]
    earlier: int | None = None

    @property
    def cp_size(self) -> int:
        return len(self.pieces)

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return sum(self.segment_lengths)

    @cached_property
    def tokens_per_rank(self) -> NDArray[np.int64]:
        """Tokens that each rank holds; shape (cp_size,)."""
        return np.array([int((table[:, 2] - table[:, 1]).sum()) for table in self.pieces])

    @cached_property
    def receivers(self) -> NDArray[np.bool_]:
        """Which ranks receive the keys of each piece, shape (ranks, pieces), pieces rank after rank.

        These are the ranks that hold a later piece of the same segment; for a slice, all ranks.
        """
        segment, start, _ = np.concatenate(self.pieces).T
        owner = owners(self.pieces)
        last_starts = np.full((self.cp_size, len(self.segment_lengths)), -1, dtype=np.int64)
        np.maximum.at(last_starts, (owner, segment), start)
        if self.earlier is not None:
            last_starts[:, 0] = self.segment_lengths[0]  # where the next slice begins
        receive: NDArray[np.bool_] = start < last_starts[:, segment]
        receive[owner, np.arange(len(owner))] = False
        return receive

    @cached_property
    def kv_traffic(self) -> NDArray[np.int64]:
        """Tokens whose keys and values rank i sends to rank j, at [i, j]; shape (cp_size, cp_size)."""
        table = np.concatenate(self.pieces)
        traffic = np.zeros((self.cp_size, self.cp_size), dtype=np.int64)
        receiver, piece = np.nonzero(self.receivers)
        np.add.at(traffic, (owners(self.pieces)[piece], receiver), (table[:, 2] - table[:, 1])[piece])
        return traffic

    @property
    def kv_gather_fraction(self) -> float:
        """Share of the micro-batch's tokens whose keys and values another rank receives."""
        table = np.concatenate(self.pieces)
        travels = self.receivers.any(axis=0)
        return float((table[:, 2] - table[:, 1])[travels].sum() / self.tokens)

    @property
    def keeps_received(self) -> bool:
        """Whether ranks keep received keys and values until the backward (``keeps_received``); always for slices."""
        return self.earlier is not None or bool(
            keeps_received(self.kv_traffic.sum(axis=0).max(), self.tokens, self.cp_size)
        )

    @property
    def exchange_parts(self) -> int:
        """Number of parts in which keys and values arrive (``exchange_parts``)."""
        busiest = max(self.kv_traffic.sum(axis=0).max(), self.kv_traffic.sum(axis=1).max())
        return int(exchange_parts(busiest, self.tokens, self.cp_size))

    def positions(self, rank: int) -> NDArray[np.int64]:
        """Positions in the micro-batch of the tokens that ``rank`` holds, in its order; shape (local tokens,)."""
        segment, start, stop = self.pieces[rank].T
        before = np.cumsum(self.segment_lengths) - self.segment_lengths
        return ranges(before[segment] + start, stop - start)


def keeps_received(received: ArrayLike, tokens: ArrayLike, cp_size: int) -> NDArray[np.bool_]:
    """Whether the ranks of a group keep received keys and values until the backward, instead of receiving them again.

    They keep them if no rank receives more than an even share of the ``tokens`` of the micro-batch (``received`` is the
    most of any rank): then memory does not grow with the group. Also takes arrays of many micro-batches.
    """
    kept: NDArray[np.bool_] = np.asarray(received) <= -(-np.asarray(tokens) // cp_size)
    return kept


def exchange_parts(exchanged: ArrayLike, tokens: ArrayLike, cp_size: int) -> NDArray[np.int64]:
    """Number of parts in which the keys and values of a micro-batch are sent (``PART_CUTS``).

    One part for every even share of ``tokens`` among the ``exchanged`` tokens of the busiest rank, up to
    ``MOST_PARTS``: every part costs passes over the results of queries. Also takes arrays of many micro-batches.
    """
    even = np.maximum(1, -(-np.asarray(tokens) // cp_size))
    parts: NDArray[np.int64] = np.clip(-(-np.asarray(exchanged) // even), 1, MOST_PARTS)
    return parts


def owners(pieces: tuple[Table, ...]) -> NDArray[np.int64]:
    """The rank of every piece, rank after rank."""
    return np.repeat(np.arange(len(pieces)), [len(table) for table in pieces])


def ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the ranges ``starts[i], starts[i] + 1, ...`` of ``lengths[i]`` numbers each."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + lengths, lengths)
