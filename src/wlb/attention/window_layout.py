"""What one rank computes under a ``ShardPlan`` in a sliding-window layer, as index arrays.

A token attends the last ``window`` tokens of its segment, itself included. So a piece from ``start`` to ``stop`` needs
the keys from ``start - window + 1`` on and no others, and every piece that lies before another rank's sends just its
end. A rank then has all keys that a piece of its own attends in one run, in their order, whose last ones are the
piece's own: every back end computes that in one call, and nothing is merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wlb.attention.runs import Runs
from wlb.attention.shard_layout import Message, check_order, once_per_plan, starts
from wlb.sharding.plan import ShardPlan, Table, owners, ranges

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class WindowLayout:
    """One rank's side of a plan for one window; tensors are int64 on the rank's device."""

    runs: Runs | None  # local pieces, and the keys that each sees; None where this rank has no tokens
    key_rows: Tensor  # those keys, run after run: rows of the local tokens followed by the received ones
    message: Message | None  # the ends of pieces, to and from every rank; None where no rank sends anything


def window_layout(plan: ShardPlan, rank: int, window: int, device: torch.device) -> WindowLayout:
    """The layout of ``rank`` on ``device``; computed once for each plan object, and kept as long as that lives.

    Raises ``ValueError`` for a plan whose pieces are not in packed order.
    """
    return once_per_plan(plan, (rank, device, window), lambda: _make_layout(plan, rank, window, device))


def _make_layout(plan: ShardPlan, rank: int, window: int, device: torch.device) -> WindowLayout:
    own, table = plan.pieces[rank], np.concatenate(plan.pieces)
    check_order(own, rank)
    owner = owners(plan.pieces)
    reached = np.stack([_reached(table, pieces, window) for pieces in plan.pieces])  # (ranks, pieces)
    reached[owner, np.arange(len(owner))] = 0
    counts = np.zeros((plan.cp_size, plan.cp_size), np.int64)  # from i to j
    np.add.at(counts, owner, reached.T)

    own_lengths = own[:, 2] - own[:, 1]
    own_rows, sent = starts(own_lengths), reached[:, owner == rank]
    arriving = np.flatnonzero(reached[rank])
    lengths = reached[rank][arriving]
    received = np.stack([table[arriving, 0], table[arriving, 2] - lengths, table[arriving, 2]], axis=1)
    rows = np.concatenate([own_rows, own_lengths.sum() + starts(lengths)])
    key_rows, key_lengths = _keys_in_window(own, np.concatenate([own, received]), rows, window)

    def on_device(indices: Indices) -> Tensor:
        return torch.from_numpy(indices).to(device)

    message = Message(
        send_rows=on_device(ranges((own_rows + own_lengths - sent).ravel(), sent.ravel())),
        send_counts=counts[rank].tolist(),
        receive_counts=counts[:, rank].tolist(),
    )
    return WindowLayout(
        runs=Runs(tuple(own_lengths.tolist()), tuple(key_lengths.tolist()), True, window) if len(own) else None,
        key_rows=on_device(key_rows),
        message=message if counts.any() else None,
    )


def _reached(table: Table, pieces: Table, window: int) -> Indices:
    """Of every piece of ``table``, how many tokens at its end the windows of ``pieces`` reach.

    What a window reaches of a piece before it is an end of it, and the first of ``pieces`` that follow reaches most.
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


def _keys_in_window(own: Table, held: Table, rows: Indices, window: int) -> tuple[Indices, Indices]:
    """Rows of the keys that the pieces of ``own`` see, piece after piece, and how many each sees.

    ``held`` are the runs of keys on this rank, and ``rows`` the row at which each begins.
    """
    order = np.lexsort((held[:, 1], held[:, 0]))
    segment, start, stop = held[order].T
    rows = rows[order]
    span = 1 + int(stop.max(initial=0))
    needed = np.maximum(own[:, 1] - window + 1, 0)
    first = np.searchsorted(segment * span + stop, own[:, 0] * span + needed, side="right")
    last = np.searchsorted(segment * span + start, own[:, 0] * span + own[:, 2])
    seen = ranges(first, last - first)
    piece = np.repeat(np.arange(len(own)), last - first)
    begin = np.maximum(start[seen], needed[piece])
    lengths = stop[seen] - begin
    return ranges(rows[seen] + begin - start[seen], lengths), own[:, 2] - needed
