"""Hybrid sharding: long documents are cut over all ranks, short ones stay whole on one.

Cutting a document balances it but moves its keys and values; keeping it whole moves nothing but may overload its rank.
The k longest documents are sharded per document and the others dealt whole, dearest first, to the rank with the least
seconds and room for their tokens. The k with the fastest slowest rank wins: k grows until what must be gathered alone
makes a better result impossible.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.latency import piece_seconds
from wlb.sharding.per_document import chunk_table
from wlb.sharding.plan import Table, split_by_rank
from wlb.workload.base import Workload

MEMORY_FACTOR = 1.25  # tokens a rank may hold, over its even share


def hybrid_pieces(
    lengths: NDArray[np.int64], cp_size: int, workload: Workload, memory_factor: float = MEMORY_FACTOR
) -> tuple[Table, ...]:
    """Shard as few of the longest segments as make the slowest rank fastest.

    No rank holds more than ``memory_factor`` times its even share of the tokens, nor more than one token above it
    where documents are too long to be dealt whole under that bound.
    """
    by_length = np.argsort(-lengths, kind="stable")
    ordered = lengths[by_length]
    token_seconds = float(workload.linear_seconds(int(lengths.sum()))) / int(lengths.sum())
    whole_seconds = (workload.attention_seconds(ordered) + token_seconds * ordered).tolist()
    room = int(memory_factor * lengths.sum() / cp_size) + 1
    ranks, table = chunk_table(by_length, ordered, cp_size)
    cut_seconds = piece_seconds(table, lengths, workload) + token_seconds * (table[:, 2] - table[:, 1])
    chunks = 2 * cp_size
    per_rank_seconds = _cumulative_by_rank(ranks, cut_seconds, cp_size, chunks)
    per_rank_tokens = _cumulative_by_rank(ranks, table[:, 2] - table[:, 1], cp_size, chunks)
    gathered_tokens = np.concatenate([[0], np.cumsum(ordered)])
    whole_total = np.concatenate([np.cumsum(whole_seconds[::-1])[::-1], [0.0]])

    best_seconds, best_cut, best_owners = np.inf, len(lengths), np.zeros(0, dtype=np.int64)
    for cut in range(len(lengths) + 1):
        gather = float(workload.kv_gather_seconds(int(gathered_tokens[cut]), cp_size))
        mean = (per_rank_seconds[cut].sum() + whole_total[cut]) / cp_size
        if mean + gather >= best_seconds:
            break  # both only grow with the number of cut documents
        dealt = _deal(
            per_rank_seconds[cut].tolist(), per_rank_tokens[cut].tolist(), whole_seconds, ordered.tolist(), cut, room
        )
        if dealt is not None and dealt[0] + gather < best_seconds:
            best_seconds, best_cut, best_owners = dealt[0] + gather, cut, np.array(dealt[1], dtype=np.int64)
    kept = by_length[best_cut:]
    whole_rows = np.stack([kept, np.zeros_like(kept), lengths[kept]], axis=1)
    return split_by_rank(
        np.concatenate([ranks[: best_cut * chunks], best_owners]),
        np.concatenate([table[: best_cut * chunks], whole_rows]),
        cp_size,
    )


def _deal(
    seconds: list[float], tokens: list[int], whole_seconds: list[float], lengths: list[int], cut: int, room: int
) -> tuple[float, list[int]] | None:
    """Deal documents ``cut`` and on, longest first, to ranks already loaded with ``seconds`` and ``tokens``.

    Returns the slowest rank's seconds and each document's rank; None where a document finds no room.
    """
    heap = [(load, rank) for rank, load in enumerate(seconds)]
    heapify(heap)
    owners: list[int] = []
    for price, length in zip(whole_seconds[cut:], lengths[cut:], strict=True):
        full: list[tuple[float, int]] = []
        while heap and tokens[heap[0][1]] + length > room:
            full.append(heappop(heap))
        if not heap:
            return None
        load, rank = heappop(heap)
        tokens[rank] += length
        owners.append(rank)
        heappush(heap, (load + price, rank))
        for entry in full:
            heappush(heap, entry)
    return max(load for load, _ in heap), owners


def _cumulative_by_rank(
    ranks: NDArray[np.int64], values: NDArray[np.float64] | NDArray[np.int64], cp_size: int, chunks: int
) -> NDArray[np.float64]:
    """Sum per rank of the first k documents' chunks, for k from 0; shape (documents + 1, cp_size)."""
    by_document = values.reshape(-1, chunks)
    head, tail = by_document[:, :cp_size], by_document[:, cp_size:][:, ::-1]
    return np.concatenate([np.zeros((1, cp_size)), np.cumsum(head + tail, axis=0)])
