"""What one rank computes under a ``ShardPlan``, as index arrays that all layers of a kind share.

The tokens of a segment on one rank attend each other causally, without anything from other ranks. A piece from
``start`` to ``stop`` also attends the keys of its segment before ``start`` on other ranks. It attends all of them, so
no mask is needed. So each rank sends every piece to the ranks that hold a later piece of the same segment, and to no
others (``ShardPlan.kv_traffic``). Where that is much it goes in parts (``ShardPlan.exchange_parts``), so that a rank
attends the first part while the others travel.

In a layer with a sliding window a token attends the last ``window`` tokens of its segment, itself included. So a piece
needs only the keys from ``start - window + 1`` on, and a rank sends only the end of a piece. A rank then holds all keys
that a piece attends as one sequence, in order, which ends with the keys of the piece. Every back end computes that in
one call, and nothing is merged.

Where the first segment is a slice, every rank receives as much of it as the next slice attends, and holds as much of
the earlier slices as this one attends (``wlb.attention.slices``). These count as one more received part, or in a window
as received keys with negative positions.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wlb.attention.variable_length import VariableLengthBatch
from wlb.sharding.plan import PART_CUTS, ShardPlan, Table, owners, ranges

Indices = NDArray[np.int64]
Rows = Tensor | slice  # of a tensor: int64 indices on its device, or a slice where the rows are adjacent


class RowSums(NamedTuple):
    """Which values are summed into which row.

    The values of ``rows[i]`` are ``order[starts[i]:starts[i + 1]]``, or ``order[i]`` where every row has one value.
    """

    rows: Rows  # distinct, ascending
    order: Tensor
    starts: Tensor | None


class Attended(NamedTuple):
    """Local pieces against the keys before them on other ranks."""

    batch: VariableLengthBatch
    query_rows: Rows  # local tokens that attend received keys, sequence after sequence
    key_rows: Rows  # received tokens that they attend, sequence after sequence
    key_sums: RowSums  # from ``key_rows`` to every received token


@dataclass(frozen=True)
class ExchangePart:
    """Keys and values to and from every rank, and what attends them here; tensors are int64 on the local device."""

    send_rows: Tensor  # local tokens to send, destination after destination
    send_counts: list[int]  # tokens for each rank
    receive_counts: list[int]  # tokens from each rank
    send_sums: RowSums | None  # from ``send_rows``; None where no token goes to several ranks
    attended: Attended | None = None  # None in windows, and where only a later slice attends what this part brings


@dataclass(frozen=True)
class ShardLayout:
    """The part of one rank in a plan, for layers with or without a window; a single rank needs ``own_batch`` only."""

    own_batch: VariableLengthBatch | None  # local tokens of each segment, or local pieces; None without tokens
    window_rows: Tensor | None = None  # keys of ``own_batch`` in a window: rows of local tokens, then received ones
    window_sums: RowSums | None = None  # from ``window_rows`` to every local and received token
    parts: tuple[ExchangePart, ...] = ()  # in the order of sending; empty where no rank sends anything
    keeps_received: bool = True  # until the backward; the same on all ranks
    slice_rows: Rows | None = None  # what the next slice attends: rows of local tokens, then of all received ones
    earlier: int = 0  # attended tokens before a slice; in a window their rows follow the received ones
    before: Attended | None = None  # local tokens against these earlier ones; None in windows


_layouts: WeakKeyDictionary[ShardPlan, dict[object, ShardLayout]] = WeakKeyDictionary()


def shard_layout(plan: ShardPlan, rank: int, device: torch.device, window: int | None = None) -> ShardLayout:
    """The layout of ``rank`` on ``device``, computed once for each plan object and kept while that object lives.

    Raises ``ValueError`` for a plan whose pieces are not in packed order.
    """
    layouts, key = _layouts.setdefault(plan, {}), (rank, device, window)
    if key not in layouts:
        _check_order(plan.pieces[rank], rank)
        layouts[key] = _layout(plan, rank, device) if window is None else _window_layout(plan, rank, device, window)
    return layouts[key]


def _layout(plan: ShardPlan, rank: int, device: torch.device) -> ShardLayout:
    own = plan.pieces[rank]
    _, start, stop = np.concatenate(plan.pieces).T
    parts = plan.exchange_parts if plan.kv_traffic.any() else 0
    cuts = [start + ((stop - start) * cut).astype(np.int64) for cut in PART_CUTS[parts]] if parts else []
    messages = [_message(plan, rank, device, begin, (end - begin) * plan.receivers) for begin, end in pairwise(cuts)]
    held = np.concatenate([own, *(received for _, received in messages)])
    of_segments = np.bincount(own[:, 0], _lengths(own), 1).astype(np.int64)  # local tokens
    return ShardLayout(
        own_batch=VariableLengthBatch.of_segments(tuple(of_segments[of_segments > 0].tolist())) if len(own) else None,
        parts=tuple([replace(part, attended=_attended(own, received, device)) for part, received in messages]),
        keeps_received=plan.keeps_received,
        slice_rows=_rows(device, _keys_seen(_after(plan), held)[0]),
        earlier=plan.earlier or 0,
        # The local tokens of a slice attend earlier slices as one sequence.
        before=_attended(_piece(0, int(of_segments[0])), _piece(-(plan.earlier or 0), 0), device),
    )


def _piece(start: int, stop: int) -> Table:
    """A table with this piece of the first segment, or with none where the piece is empty."""
    return np.array([[0, start, stop]])[: stop > start]


def _after(plan: ShardPlan) -> Table:
    """The first token of the next slice, if the plan has a slice: every rank holds what that token attends."""
    length = plan.segment_lengths[0]
    return _piece(length, length + (plan.earlier is not None))


def _attended(own: Table, held: Table, device: torch.device) -> Attended | None:
    """The pieces of ``own`` against those of ``held`` before them."""
    key_rows, key_lengths = _keys_seen(own, held)
    if not len(key_rows):
        return None
    own_lengths, attending = _lengths(own), np.flatnonzero(key_lengths)
    batch = VariableLengthBatch(
        tuple(own_lengths[attending].tolist()), tuple(key_lengths[attending].tolist()), causal=False
    )
    queries = _rows(device, ranges(_starts(own_lengths)[attending], own_lengths[attending]))
    return Attended(batch, queries, _rows(device, key_rows), _row_sums(device, key_rows, int(_lengths(held).sum())))


def _window_layout(plan: ShardPlan, rank: int, device: torch.device, window: int) -> ShardLayout:
    own, table, owner = plan.pieces[rank], np.concatenate(plan.pieces), owners(plan.pieces)
    of_next = _reached(table, _after(plan), window)
    reached = np.stack([np.maximum(_reached(table, pieces, window), of_next) for pieces in plan.pieces])
    reached[owner, np.arange(len(owner))] = 0  # of shape (ranks, pieces)
    message, received = _message(plan, rank, device, table[:, 2] - reached, reached)
    held, earlier = np.concatenate([own, received]), min(plan.earlier or 0, window - 1)
    keys = np.concatenate([held, _piece(-earlier, 0)])
    key_rows, key_lengths = _keys_seen(own, keys, window)
    batch = VariableLengthBatch(tuple(_lengths(own).tolist()), tuple(key_lengths.tolist()), True, window)
    return ShardLayout(
        own_batch=batch if len(own) else None,
        window_rows=on_device(key_rows, device),
        window_sums=_row_sums(device, key_rows, int(_lengths(keys).sum())),
        parts=(message,) if reached.any() else (),
        slice_rows=_rows(device, _keys_seen(_after(plan), held, window)[0]),
        earlier=earlier,
    )


def _message(
    plan: ShardPlan, rank: int, device: torch.device, begin: Indices, lengths: Indices
) -> tuple[ExchangePart, Table]:
    """The exchange with every rank, with ``attended`` not set, and the received pieces, sender after sender.

    Rank i receives ``lengths[i, j]`` tokens of piece j, from ``begin[j]`` or ``begin[i, j]`` on.
    """
    table, owner, begin = np.concatenate(plan.pieces), owners(plan.pieces), np.broadcast_to(begin, lengths.shape)
    counts = np.zeros((plan.cp_size, plan.cp_size), np.int64)  # tokens from rank i to rank j
    np.add.at(counts, owner, lengths.T)
    mine, arriving = owner == rank, np.flatnonzero(lengths[rank])
    first_sent_rows = _starts(_lengths(plan.pieces[rank])) + (begin - table[:, 1])[:, mine]
    first, tokens = begin[rank, arriving], lengths[rank, arriving]
    rows = ranges(first_sent_rows.ravel(), lengths[:, mine].ravel())
    sums = _row_sums(device, rows) if len(np.unique(rows)) < len(rows) else None
    message = ExchangePart(on_device(rows, device), counts[rank].tolist(), counts[:, rank].tolist(), sums)
    return message, np.stack([table[arriving, 0], first, first + tokens], axis=1)


def _reached(table: Table, pieces: Table, window: int) -> Indices:
    """For every piece of ``table``, how many tokens at its end the windows of ``pieces`` reach.

    A window always reaches the end of an earlier piece, and the first later piece reaches the most of it.
    """
    segment, start, stop = table.T
    span = 1 + int(stop.max())
    if not len(pieces):
        return np.zeros(len(table), np.int64)
    following = np.searchsorted(pieces[:, 0] * span + pieces[:, 1], segment * span + stop)
    first = pieces[np.minimum(following, len(pieces) - 1)]
    in_segment = (following < len(pieces)) & (first[:, 0] == segment)
    reached: Indices = np.where(in_segment, stop - np.maximum(start, first[:, 1] - window + 1), 0).clip(min=0)
    return reached


def _keys_seen(own: Table, held: Table, window: int | None = None) -> tuple[Indices, Indices]:
    """Rows of the keys that the pieces of ``own`` see, piece after piece, and how many each piece sees.

    ``held`` are the pieces of keys, in the order of their rows.
    """
    order = np.lexsort((held[:, 1], held[:, 0]))
    rows, (segment, start, stop) = _starts(_lengths(held))[order], held[order].T
    lowest = start.min(initial=0)  # negative before a slice
    span = 1 + max(stop.max(initial=0), own[:, 2].max(initial=0)) - lowest
    needed = own[:, 1] * 0 + lowest if window is None else np.maximum(own[:, 1] - window + 1, lowest)
    first = np.searchsorted(segment * span + stop, own[:, 0] * span + needed, side="right")
    last = np.searchsorted(segment * span + start, own[:, 0] * span + own[:, 2])
    seen, piece = ranges(first, last - first), np.repeat(np.arange(len(own)), last - first)
    begin = np.maximum(start[seen], needed[piece])
    lengths = stop[seen] - begin
    per_piece = np.zeros(len(own), np.int64)
    np.add.at(per_piece, piece, lengths)
    return ranges(rows[seen] + begin - start[seen], lengths), per_piece


def _lengths(table: Table) -> Indices:
    return table[:, 2] - table[:, 1]


def _starts(lengths: Indices) -> Indices:
    """Where pieces of these lengths begin when they follow each other."""
    return np.cumsum(lengths) - lengths


def on_device(values: NDArray[np.integer[Any]] | Tensor, device: torch.device) -> Tensor:
    """``values`` on ``device``; the copy to a GPU does not block."""
    tensor, to_gpu = torch.as_tensor(values), device.type == "cuda" and torch.cuda.is_available()
    if to_gpu and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=to_gpu)


def _row_sums(device: torch.device, rows: Indices, tokens: int | None = None) -> RowSums:
    """Sums into the rows that ``rows`` name, or into all ``tokens`` rows, of which some may have no value."""
    order = np.argsort(rows, kind="stable")
    distinct = np.unique(rows) if tokens is None else np.arange(tokens)
    each_has_one = np.array_equal(rows[order], distinct)
    starts = None if each_has_one else on_device(np.searchsorted(rows[order], distinct), device)
    return RowSums(_rows(device, distinct), on_device(order, device), starts)


def _rows(device: torch.device, indices: Indices) -> Rows:
    follow = len(indices) > 0 and bool((np.diff(indices) == 1).all())
    return slice(int(indices[0]), int(indices[-1]) + 1) if follow else on_device(indices, device)


def _check_order(table: Table, rank: int) -> None:
    """Raise ``ValueError`` unless the pieces of ``rank`` are in packed order."""
    segment, start, stop = table.T
    same = segment[1:] == segment[:-1]
    in_order = np.where(same, start[1:] >= stop[:-1], segment[1:] > segment[:-1])
    if not in_order.all() or (start >= stop).any():
        raise ValueError(f"the pieces of rank {rank} are empty or out of order; sort them by segment and start")
