"""What one rank computes under a ``ShardPlan``, as index arrays that all layers share.

The tokens of a segment that lie on one rank attend each other causally, in their order: that part needs nothing
from others. What is missing for the rank's piece ``start`` to ``stop`` are the segment's keys before ``start`` on
other ranks; the piece attends all of them, so no mask is needed. So each rank sends a piece of its own to every rank
that holds a later piece of the same segment, and to no other (``ShardPlan.kv_traffic``); in equal parts where that is
much (``ShardPlan.exchange_parts``), so that the first is attended while the others are on their way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wlb.attention.runs import Runs
from wlb.sharding.plan import ShardPlan, Table, owners, ranges, receivers

Indices = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """Keys and values to and from every rank; the tensor is int64 on the rank's device."""

    send_rows: Tensor  # local tokens to send, destination after destination
    send_counts: list[int]  # tokens for each rank
    receive_counts: list[int]  # tokens from each rank


@dataclass(frozen=True)
class ExchangePart(Message):
    """One message, and who attends what arrives; tensors are int64 on the rank's device."""

    runs: Runs | None  # local pieces against the keys before them on other ranks; None where there are none
    query_rows: Tensor  # local tokens that attend received keys, run after run
    key_rows: Tensor  # received tokens that they attend, run after run


@dataclass(frozen=True)
class ShardLayout:
    """One rank's side of a plan."""

    own_runs: Runs | None  # this rank's tokens of each segment; None where it has no tokens
    parts: tuple[ExchangePart, ...]  # in the order in which they are sent; none where no rank sends anything
    keeps_received: bool  # until the backward; the same on all


def shard_layout(plan: ShardPlan, rank: int, device: torch.device) -> ShardLayout:
    """The layout of ``rank`` on ``device``; computed once for each plan object, and kept as long as that lives.

    Raises ``ValueError`` for a plan whose pieces are not in packed order.
    """
    return once_per_plan(plan, (rank, device), lambda: _make_layout(plan, rank, device))


def _make_layout(plan: ShardPlan, rank: int, device: torch.device) -> ShardLayout:
    own = plan.pieces[rank]
    check_order(own, rank)
    parts = range(plan.exchange_parts) if plan.kv_traffic.any() else range(0)
    owner, attends = owners(plan.pieces), receivers(plan.pieces)
    return ShardLayout(
        own_runs=Runs.of_segments(_tokens_per_segment(own)) if len(own) else None,
        parts=tuple([_make_part(plan, rank, owner, attends, part, len(parts), device) for part in parts]),
        keeps_received=plan.keeps_received,
    )


def _make_part(
    plan: ShardPlan, rank: int, owner: Indices, attends: NDArray[np.bool_], part: int, parts: int, device: torch.device
) -> ExchangePart:
    """The ``part``-th of ``parts`` equal parts of every piece that travels, from its owner to who ``attends`` it."""
    own, table = plan.pieces[rank], np.concatenate(plan.pieces)
    segment, start, stop = table.T
    begin = start + (stop - start) * part // parts
    lengths = start + (stop - start) * (part + 1) // parts - begin
    counts = np.zeros((plan.cp_size, plan.cp_size), np.int64)  # from i to j
    receiver, piece = np.nonzero(attends)
    np.add.at(counts, (owner[piece], receiver), lengths[piece])

    own_lengths = own[:, 2] - own[:, 1]
    own_rows = starts(own_lengths)
    mine = owner == rank
    _, sent = np.nonzero(attends[:, mine])  # by destination
    arriving = np.flatnonzero(attends[rank] & (lengths > 0))  # by source
    pieces_before = np.stack([segment, begin, begin + lengths], axis=1)[arriving]
    attending, key_pieces, key_lengths = _keys_before(own, pieces_before)

    def on_device(indices: Indices) -> Tensor:
        return torch.from_numpy(indices).to(device)

    return ExchangePart(
        send_rows=on_device(ranges((own_rows + (begin - start)[mine])[sent], lengths[mine][sent])),
        send_counts=counts[rank].tolist(),
        receive_counts=counts[:, rank].tolist(),
        runs=(
            Runs(tuple(own_lengths[attending].tolist()), tuple(key_lengths.tolist()), causal=False)
            if len(attending)
            else None
        ),
        query_rows=on_device(ranges(own_rows[attending], own_lengths[attending])),
        key_rows=on_device(ranges(starts(lengths[arriving])[key_pieces], lengths[arriving][key_pieces])),
    )


def _keys_before(own: Table, arriving: Table) -> tuple[Indices, Indices, Indices]:
    """Own pieces that have arriving ones before them; those, piece after piece; and how many tokens each sees."""
    order = np.lexsort((arriving[:, 1], arriving[:, 0]))
    segment, start, stop = arriving[order].T
    span = 1 + max(own[:, 1].max(initial=0), arriving[:, 1].max(initial=0))
    positions = segment * span + start
    first = np.searchsorted(positions, own[:, 0] * span)
    last = np.searchsorted(positions, own[:, 0] * span + own[:, 1])
    attending = np.flatnonzero(last > first)
    first, last = first[attending], last[attending]
    tokens = np.concatenate([[0], np.cumsum(stop - start)])
    return attending, order[ranges(first, last - first)], tokens[last] - tokens[first]


def _tokens_per_segment(table: Table) -> tuple[int, ...]:
    first = np.flatnonzero(np.append(True, table[1:, 0] != table[:-1, 0]))
    return tuple(np.add.reduceat(table[:, 2] - table[:, 1], first).tolist())


def starts(lengths: Indices) -> Indices:
    """Where runs of these lengths begin when they follow each other."""
    return np.cumsum(lengths) - lengths


def check_order(table: Table, rank: int) -> None:
    """Raise ``ValueError`` unless the pieces of ``rank`` are in packed order."""
    segment, start, stop = table.T
    same = segment[1:] == segment[:-1]
    in_order = np.where(same, start[1:] >= stop[:-1], segment[1:] > segment[:-1])
    if not in_order.all() or (start >= stop).any():
        raise ValueError(f"the pieces of rank {rank} must be in packed order and hold at least one token each")


_layouts: dict[int, dict[object, Any]] = {}


def once_per_plan(plan: ShardPlan, key: object, make: Callable[[], T]) -> T:
    """Plans hold arrays and cannot be hashed, so they are told apart by identity for as long as they live."""
    if id(plan) not in _layouts:
        _layouts[id(plan)] = {}
        weakref.finalize(plan, _layouts.pop, id(plan))
    layouts = _layouts[id(plan)]
    if key not in layouts:
        layouts[key] = make()
    made: T = layouts[key]
    return made
