"""Balanced sharding: every rank gets equal tokens and equal attention, and only keys and values are sent.

A piece of a long document can vary in length and in depth, and attention per token grows with depth. So ranks can be
equal in tokens and in attention at once, and then also in forward, backward and memory. A micro-batch is divided in
three steps:

1. Documents too large for the even share of a rank will be cut. Treat everything else as a fluid of one price per
   token, and divide those parts that cost more than the mean token among the ranks, in contiguous pieces of equal
   excess. That tells how much of these parts each rank will hold.
2. Assign documents that fit whole, largest first, each to the rank that stays least full in tokens and in attention.
   The shortest documents are kept for the end; a document without room is cut too.
3. Lay out everything to be cut in one row: cheap tokens first (heads of cut documents, short documents), then the
   expensive parts, the deepest last. Each rank in turn takes the tokens that it lacks from both ends of the row,
   divided between the ends so that it also gets the attention that it lacks.

A document alone in its micro-batch is thus cut into pairs of a head and a tail piece. Among short documents, which
supply the cheap tokens, a long one is cut into contiguous pieces that get shorter with depth.

``hybrid`` also has a plan of even tokens, which balances attention less but may send fewer keys and values. A
micro-batch gets that plan if it is predicted to be over 1% faster.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wlb.sharding.adaptive import Candidates, best_pieces, candidates_of, joined, price
from wlb.sharding.hybrid import EVEN_TOKENS, TOLERANCE, hybrid_candidates
from wlb.sharding.pieces import Integers, MicroBatches, Pieces
from wlb.workload import Costs
from wlb.workload.base import Seconds

# Cuts lie at multiples of a tile of queries, if an even share then has enough places to cut.
_TILE = 128
_LEAST_CELLS = 128  # in an even share
_MOST_CELLS = 2**18  # in a micro-batch; over 32M tokens are cut at multiples of several tiles
_SHORT = 1 / 24  # of an even share: documents up to this are kept for the end
_SHORT_TOKENS = 0.1  # of the micro-batch: the most that is kept for the end


def balanced(micro_batches: MicroBatches, cp_size: int, workload: Costs) -> Pieces:
    """Balance tokens and attention, with a ``hybrid`` plan instead if that makes the group faster."""
    slices = uneven_slices(micro_batches, cp_size, workload)
    candidates = joined([slices, hybrid_candidates(micro_batches, cp_size, workload, EVEN_TOKENS)])
    seconds, _ = price(candidates, workload)
    seconds[: len(micro_batches.counts)] *= 1 - TOLERANCE  # favours the uneven pieces, which come first
    return best_pieces(candidates, seconds)


def uneven_slices(micro_batches: MicroBatches, cp_size: int, workload: Costs) -> Candidates:
    """Balance tokens and attention of all ranks, within a cell of about 1% of the share of a rank."""
    plans = ((i, *_Slicing(lengths, cp_size, workload).rows()) for i, lengths in enumerate(micro_batches.each))
    return candidates_of(plans, micro_batches, cp_size)


class _DocumentRow(NamedTuple):
    """Cells of documents in a row, with the tokens and the seconds of attention before each, and at the end of all."""

    cells: Integers  # (cells, 3): document, start, stop
    tokens: Seconds  # (cells + 1,), whole numbers
    attention: Seconds  # (cells + 1,)
    middles: Seconds  # tokens before the middle of each cell, (cells,)


class _Slicing:
    """One micro-batch of documents of ``lengths`` tokens among ``ranks`` ranks."""

    def __init__(self, lengths: Integers, ranks: int, workload: Costs) -> None:
        self._lengths, self._ranks, self._workload = lengths, ranks, workload
        self._attention = workload.attention_seconds(lengths)
        self._even_tokens = float(lengths.sum()) / ranks
        self._even_attention = float(self._attention.sum()) / ranks
        self._cell = 1
        while self._cell < _TILE and 2 * self._cell * _LEAST_CELLS <= self._even_tokens:
            self._cell *= 2
        while self._cell * _MOST_CELLS < self._even_tokens * ranks:
            self._cell *= 2
        # Depth in a document at which a token costs as much as the mean token; a multiple of the cell.
        places = np.arange(0, int(lengths.max()) + 2 * self._cell, self._cell)
        price = np.diff(workload.attention_seconds(places)) / self._cell
        self._depth = int(places[np.searchsorted(price, self._even_attention / self._even_tokens)])

    def rows(self) -> tuple[Integers, Integers]:
        """The rank of every piece, shape (pieces,), and the pieces (document, start, stop), not yet merged."""
        order = np.argsort(-self._lengths, kind="stable")
        fits = (self._lengths <= self._even_tokens) & (self._attention <= self._even_attention)
        long, whole = order[~fits[order]], order[fits[order]]
        sizes = self._lengths[whole]
        few = np.cumsum(sizes[::-1])[::-1] <= _SHORT_TOKENS * self._even_tokens * self._ranks
        short = whole[few & (sizes <= _SHORT * self._even_tokens)]  # kept for the end
        owners, tokens, attention = self._assign(whole[: len(whole) - len(short)], *self._room(long))
        cut = np.concatenate([long, whole[: len(owners)][owners < 0]])
        assigned = whole[: len(owners)][owners >= 0]
        ranks, cells = self._share_out(cut, short, tokens, attention, in_order=len(long) > 0)
        uncut = np.stack([assigned, np.zeros_like(assigned), self._lengths[assigned]], axis=1)
        return np.concatenate([owners[owners >= 0], ranks]), np.concatenate([uncut, cells])

    def _room(self, long: Integers) -> tuple[Seconds, Seconds]:
        """Tokens and attention that each rank has room for beside its share of the expensive parts of ``long``."""
        dear = self._row((long[::-1], self._depth, None))
        cheap_tokens = self._even_tokens * self._ranks - dear.tokens[-1]
        price = max(0.0, self._even_attention * self._ranks - dear.attention[-1]) / max(cheap_tokens, 1.0)
        excess = dear.attention - price * dear.tokens
        # The deepest part, at the end of the row, goes to the first rank.
        bounds = np.searchsorted(excess, excess[-1] * np.arange(self._ranks, -1, -1) / self._ranks)
        bounds[0], bounds[-1] = len(dear.cells), 0
        return (
            np.maximum(0.0, self._even_tokens + np.diff(dear.tokens[bounds])),
            np.maximum(0.0, self._even_attention + np.diff(dear.attention[bounds])),
        )

    def _assign(
        self, descending: Integers, room_tokens: Seconds, room_attention: Seconds
    ) -> tuple[Integers, Seconds, Seconds]:
        """The rank of every whole document (-1 without room), and the tokens and attention of each rank then."""
        owners = np.full(len(descending), -1)
        sizes = np.array([self._lengths[descending], self._attention[descending]])
        rooms = np.array([np.maximum(room_tokens, 1e-3), np.maximum(room_attention, 1e-3 * self._even_attention)])
        shares, full = 1 / rooms, np.zeros(rooms.shape)  # of the room
        for index, size in enumerate(sizes.T[..., None]):
            filled = size * shares
            filled += full
            fullness = np.maximum(filled[0], filled[1])
            rank = int(fullness.argmin())
            if fullness[rank] <= 1.0:
                owners[index] = rank
                full[:, rank] = filled[:, rank]
        held = owners >= 0
        tokens, attention = (
            np.bincount(owners[held], amount[held], self._ranks).astype(np.float64) for amount in sizes
        )
        return owners, tokens, attention

    def _share_out(
        self, cut: Integers, short: Integers, tokens: Seconds, attention: Seconds, *, in_order: bool
    ) -> tuple[Integers, Integers]:
        """Ranks and cells of everything to be cut, for ranks that already hold ``tokens`` and ``attention``."""
        row = self._row((cut, 0, self._depth), (short, 0, None), (cut[::-1], self._depth, None))
        lacks_tokens, lacks_attention = self._even_tokens - tokens, self._even_attention - attention
        ranks = np.arange(self._ranks)
        if not in_order:  # the rank short of the most expensive tokens takes the deepest
            ranks = np.argsort(-lacks_attention / np.maximum(lacks_tokens, 1.0), kind="stable")
            lacks_tokens, lacks_attention = lacks_tokens[ranks], lacks_attention[ranks]
        lacked_tokens, lacked_attention = (lacks[::-1].cumsum()[::-1] for lacks in (lacks_tokens, lacks_attention))
        owner = np.empty(len(row.cells), np.int64)
        first, last = 0, len(row.cells)
        for place, rank in enumerate(ranks[:-1].tolist()):
            # Rounding errors so far are shared by all following ranks.
            following = self._ranks - place
            over_tokens = (row.tokens[last] - row.tokens[first] - lacked_tokens[place]) / following
            over_attention = row.attention[last] - row.attention[first] - lacked_attention[place]
            front, back = self._take(
                row, first, last, lacks_tokens[place] + over_tokens, lacks_attention[place] + over_attention / following
            )
            owner[first:front] = owner[back:last] = rank
            first, last = front, back
        owner[first:last] = ranks[-1]
        return owner, row.cells

    def _take(self, row: _DocumentRow, first: int, last: int, tokens: float, attention: float) -> tuple[int, int]:
        """Where a rank stops that takes cells from ``first`` on and before ``last``, to get closest to both amounts."""
        earliest = int(row.tokens.searchsorted(row.tokens[last] - tokens))
        back = max(first, min(earliest, last))  # or later; a rank may already hold more than its share
        wanted = row.tokens[first] + tokens - (row.tokens[last] - row.tokens[back : last + 1])  # before the front's end
        front = np.minimum(first + row.middles[first:].searchsorted(wanted), np.arange(back, last + 1))
        taken = row.attention[front] - row.attention[first] + row.attention[last] - row.attention[back : last + 1]
        off_tokens = np.maximum(0.0, np.abs(row.tokens[front] - wanted) - self._cell)
        best = int((np.abs(taken - attention) / self._even_attention + off_tokens / self._even_tokens).argmin())
        return int(front[best]), back + best

    def _row(self, *parts: tuple[Integers, int, int | None]) -> _DocumentRow:
        """Cells of parts (documents, start, stop), in order; stop None means the end of each document."""
        documents = np.concatenate([of_part for of_part, _, _ in parts])
        start = np.repeat([start for _, start, _ in parts], [len(of_part) for of_part, _, _ in parts])
        most = np.iinfo(np.int64).max
        stops = [np.minimum(self._lengths[of_part], most if stop is None else stop) for of_part, _, stop in parts]
        stop = np.concatenate(stops)
        counts = np.maximum(0, -(-(stop - start) // self._cell))
        of_cell = np.repeat(np.arange(len(documents)), counts)
        within = np.arange(len(of_cell)) - (np.cumsum(counts) - counts)[of_cell]
        begins = start[of_cell] + self._cell * within
        ends = np.minimum(begins + self._cell, stop[of_cell])
        seconds = self._workload.attention_seconds(ends) - self._workload.attention_seconds(begins)
        cells = np.stack([documents[of_cell], begins, ends], axis=1)
        tokens = np.append(0.0, np.cumsum(ends - begins))
        return _DocumentRow(cells, tokens, np.append(0.0, np.cumsum(seconds)), (tokens[1:] + tokens[:-1]) / 2)
