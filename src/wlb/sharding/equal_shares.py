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

Arrays hold all micro-batches side by side. Tokens and attention are whole numbers, so the pieces of a micro-batch do
not depend on which others are divided with it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.pieces import Integers, MicroBatches, Pieces, in_order, merged
from wlb.workload import Costs
from wlb.workload.base import Seconds
from wlb.workload.costs import QUERY_TILE

# In an even share, for its cuts to lie at multiples of a tile of queries.
_LEAST_CELLS = 128
_MOST_CELLS = 2**18  # in a micro-batch; over 32M tokens are cut at multiples of several tiles
_SHORT = 1 / 24  # of an even share: documents up to this are kept for the end
_SHORT_TOKENS = 0.1  # of the micro-batch: the most that is kept for the end
_WHOLE = 2**40  # ticks of attention in a micro-batch, and of the excess of its expensive parts

Which = NDArray[np.bool_]


def balanced(micro_batches: MicroBatches, cp_size: int, workload: Costs) -> Pieces:
    """Balance tokens and attention of all ranks, within a cell of about 1% of the share of a rank."""
    return _Slicing(micro_batches, cp_size, workload).pieces()


class _Rows(NamedTuple):
    """Cells of documents, a row for every micro-batch, with the tokens and ticks before each and at the end of all."""

    document: Integers  # (cells,)
    start: Integers  # (cells,)
    stop: Integers  # (cells,)
    tokens: Integers  # (cells + 1,)
    ticks: Integers  # (cells + 1,)
    middles: Integers  # twice the tokens before the middle of each cell, (cells,)
    bounds: Integers  # the first cell of every row, and the number of cells; (micro_batches + 1,)


class _Slicing:
    """Micro-batches among ``ranks`` ranks; documents are numbered longest first within each micro-batch."""

    def __init__(self, micro_batches: MicroBatches, ranks: int, workload: Costs) -> None:
        sizes, counts = micro_batches
        self._ranks, self._workload, self._number = ranks, workload, len(counts)
        self._of = np.repeat(np.arange(len(counts)), counts)  # the micro-batch of every document
        self._segments = np.lexsort((-sizes, self._of))
        self._lengths = sizes[self._segments]
        self._total = self._sums(self._lengths)
        self._tick = np.maximum(self._sums(workload.attention_seconds(self._lengths)) / _WHOLE, 1e-300)
        self._ticks = self._until(self._lengths, self._of)
        self._even_tokens, self._even_ticks = self._total / ranks, self._sums(self._ticks) / ranks
        self._cell = np.ones_like(counts)
        while (fine := (self._cell < QUERY_TILE) & (2 * self._cell * _LEAST_CELLS <= self._even_tokens)).any():
            self._cell[fine] *= 2
        while (many := self._cell * _MOST_CELLS < self._total).any():
            self._cell[many] *= 2
        self._depth = self._cell * self._cells_until_mean_price(self._lengths[micro_batches.first])

    def pieces(self) -> Pieces:
        of, lengths, even = self._of, self._lengths, self._even_tokens[self._of]
        fits = (lengths <= even) & (self._ticks <= self._even_ticks[of])
        before = np.cumsum(self._total) - self._total  # tokens of earlier micro-batches
        rest = (before + self._total)[of] - np.cumsum(lengths) + lengths  # from here to the end of the micro-batch
        short = fits & (rest <= _SHORT_TOKENS * self._total[of]) & (lengths <= _SHORT * even)  # kept for the end
        owners = self._assigned(fits & ~short, self._rooms(~fits))
        held = owners >= 0
        cells, cell_owners = self._shared_out(~fits, short, held, owners)
        none = np.zeros_like(owners[held])
        whole = of[held] * self._ranks + owners[held], self._segments[held], none, lengths[held]
        lane = of[cells.document] * self._ranks + cell_owners
        cut = lane, self._segments[cells.document], cells.start, cells.stop
        pieces = merged(*map(np.concatenate, zip(whole, cut, strict=True)))  # few are left to sort
        return merged(*in_order(pieces))

    def _sums(self, values: Integers | Seconds) -> Seconds:
        """Sums over the documents of each micro-batch; shape (micro_batches,)."""
        return np.bincount(self._of, values, self._number).astype(np.float64)

    def _until(self, places: Integers, of: Integers) -> Integers:
        """Ticks of attention from the start of documents of micro-batches ``of`` up to these ``places`` (tokens)."""
        return np.rint(self._workload.attention_seconds(places) / self._tick[of]).astype(np.int64)

    def _cells_until_mean_price(self, longest: Integers) -> Integers:
        """Depth in a document, in cells, at which a token costs as much as the mean token; shape (micro_batches,)."""
        of, goal = np.arange(self._number), self._even_ticks / self._even_tokens * self._cell
        low, high = np.zeros_like(longest), longest // self._cell + 1
        while (low < high).any():
            middle = (low + high) // 2
            cheap = self._until((middle + 1) * self._cell, of) - self._until(middle * self._cell, of) < goal
            low, high = np.where(cheap & (low < high), middle + 1, low), np.where(cheap, high, middle)
        return low

    def _rooms(self, long: Which) -> NDArray[np.float64]:
        """Tokens and ticks that each rank has room for beside its share of the expensive parts of ``long`` documents.

        Shape (2, micro_batches, ranks).
        """
        even, ranks = np.stack([self._even_tokens, self._even_ticks]), self._ranks
        documents = np.flatnonzero(long)[::-1]
        documents = documents[np.argsort(self._of[documents], kind="stable")]
        dear = self._rows(documents, self._depth[self._of[documents]], self._lengths[documents])
        first, last = dear.bounds[:-1], dear.bounds[1:]
        tokens, ticks = dear.tokens[last] - dear.tokens[first], dear.ticks[last] - dear.ticks[first]
        price = np.maximum(0.0, even[1] * ranks - ticks) / np.maximum(even[0] * ranks - tokens, 1.0)
        scale = _WHOLE / np.maximum(1.0, ticks - price * tokens)
        of = np.repeat(np.arange(self._number), last - first)
        done = dear.ticks[:-1] - dear.ticks[first][of] - price[of] * (dear.tokens[:-1] - dear.tokens[first][of])
        excess = np.maximum.accumulate(np.rint(done * scale[of]).astype(np.int64) + 2 * _WHOLE * of)
        # The deepest part, at the end of the row, goes to the first rank.
        wanted = _WHOLE * np.arange(ranks, -1, -1) // ranks + 2 * _WHOLE * np.arange(self._number)[:, None]
        bounds = np.clip(np.searchsorted(excess, wanted), first[:, None], last[:, None])
        bounds[:, 0], bounds[:, -1] = last, first
        held = [of[bounds[:, :-1]] - of[bounds[:, 1:]] for of in (dear.tokens, dear.ticks)]
        least = 1e-3 * np.stack([np.ones(self._number), even[1]])
        return np.maximum(even[..., None] - held, least[..., None])

    def _assigned(self, candidates: Which, rooms: NDArray[np.float64]) -> Integers:
        """The rank of every document; -1 if it is no candidate or has no room.

        The n-th candidates of all micro-batches are assigned together.
        """
        places, number = np.flatnonzero(candidates), np.bincount(self._of[candidates], minlength=self._number)
        most_first = np.argsort(-number, kind="stable")
        first, falling = (np.cumsum(number) - number)[most_first], -number[most_first]
        sizes = np.stack([self._lengths, self._ticks])[..., None]
        shares, owners = 1 / rooms[:, most_first], np.full(len(self._lengths), -1)
        full = np.zeros(shares.shape)  # of the room
        for turn in range(number.max()):
            rows = np.arange(np.searchsorted(falling, -turn))
            documents = places[first[rows] + turn]
            filled = full[:, rows] + sizes[:, documents] * shares[:, rows]
            fullness = filled.max(axis=0)
            rank = fullness.argmin(axis=1)
            fits = np.flatnonzero(fullness[rows, rank] <= 1.0)
            rank = rank[fits]
            owners[documents[fits]] = rank
            full[:, fits, rank] = filled[:, fits, rank]
        return owners

    def _shared_out(self, long: Which, short: Which, held: Which, owners: Integers) -> tuple[_Rows, Integers]:
        """Cells of everything that ``owners`` do not hold whole, and the rank of each cell."""
        even, ranks = np.stack([self._even_tokens, self._even_ticks])[..., None], self._ranks
        cut, ends = np.flatnonzero(~short & ~held), np.flatnonzero(short)
        document = np.concatenate([cut, ends, cut[::-1]])
        part = np.repeat([0, 1, 2], [len(cut), len(ends), len(cut)])
        depth, length = self._depth[self._of[document]], self._lengths[document]
        start, stop = np.where(part == 2, depth, 0), np.where(part == 0, np.minimum(length, depth), length)
        order = np.lexsort((part, self._of[document]))
        cells = self._rows(document[order], start[order], stop[order])

        lane = self._of[held] * ranks + owners[held]
        sizes = (np.bincount(lane, of[held], self._number * ranks) for of in (self._lengths, self._ticks))
        lacks = even - np.stack([*sizes]).reshape(2, -1, ranks)
        in_turn = np.tile(np.arange(ranks), (self._number, 1))
        free = np.bincount(self._of[long], minlength=self._number) == 0
        # Without long documents, the rank short of the most expensive tokens takes the deepest.
        in_turn[free] = np.argsort(-lacks[1, free] / np.maximum(lacks[0, free], 1.0), axis=1, kind="stable")
        lacks = np.take_along_axis(lacks, in_turn[None], axis=2)
        lacked = lacks[..., ::-1].cumsum(axis=2)[..., ::-1]

        first, last = cells.bounds[:-1], cells.bounds[1:]
        fronts, backs = [first], [last]
        for place in range(ranks - 1):
            # Rounding errors so far are shared by all following ranks.
            left = np.stack([of[last] - of[first] for of in (cells.tokens, cells.ticks)])
            wanted = lacks[..., place] + (left - lacked[..., place]) / (ranks - place)
            first, last = self._taken(cells, first, last, *np.rint(wanted).astype(np.int64))
            fronts.append(first)
            backs.append(last)
        lengths = np.diff(np.stack([*fronts, *backs[::-1]], axis=1), axis=1)
        taking = np.concatenate([in_turn, in_turn[:, -2::-1]], axis=1)  # from both ends towards the middle
        return cells, np.repeat(taking.ravel(), lengths.ravel())

    def _taken(
        self, cells: _Rows, first: Integers, last: Integers, tokens: Integers, ticks: Integers
    ) -> tuple[Integers, Integers]:
        """Where a rank stops that takes cells from ``first`` on and before ``last``, to get closest to both amounts."""
        earliest = np.clip(np.searchsorted(cells.tokens, cells.tokens[last] - tokens), first, last)
        # Or later; a rank may already hold more than its share.
        back = np.minimum(earliest[:, None] + np.arange(1 + (last - earliest).max()), last[:, None])
        wanted = (cells.tokens[first] + tokens - cells.tokens[last])[:, None] + cells.tokens[back]
        front = np.searchsorted(cells.middles, 2 * wanted)
        front = np.clip(front, first[:, None], back)
        over = cells.ticks[front] - cells.ticks[back] + (cells.ticks[last] - cells.ticks[first] - ticks)[:, None]
        off_tokens = np.maximum(0, np.abs(cells.tokens[front] - wanted) - self._cell[:, None])
        off = np.abs(over) / self._even_ticks[:, None] + off_tokens / self._even_tokens[:, None]
        best = np.arange(self._number), off.argmin(axis=1)
        return front[best], back[best]

    def _rows(self, document: Integers, start: Integers, stop: Integers) -> _Rows:
        """Cells of parts of documents, which are in the order of their micro-batches."""
        cell = self._cell[self._of[document]]
        counts = np.maximum(0, -(-(stop - start) // cell))
        part = np.repeat(np.arange(len(document)), counts)
        within = np.arange(len(part)) - (np.cumsum(counts) - counts)[part]
        begins = start[part] + cell[part] * within
        ends, of = np.minimum(begins + cell[part], stop[part]), self._of[document[part]]
        bounds = np.searchsorted(of, np.arange(self._number + 1))
        tokens = np.append(0, np.cumsum(ends - begins))
        ticks = np.append(0, np.cumsum(self._until(ends, of) - self._until(begins, of)))
        return _Rows(document[part], begins, ends, tokens, ticks, tokens[1:] + tokens[:-1], bounds)
