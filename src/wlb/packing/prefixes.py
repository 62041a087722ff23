"""Divides documents whose groups share a prefix, such as the rollouts of a prompt.

A part computes a prefix once for all its documents of a group. So groups are cut into *pieces*: the prefix once, and
the rest of each document of the piece. Tokens and prices of pieces add up, and pieces are divided like documents.
Coarse pieces repeat few prefixes, fine ones balance better: several cuts are tried, the coarsest first.
"""

import math
from collections.abc import Iterator

import numpy as np

from wlb.errors import UserError
from wlb.lightest import into_lightest
from wlb.packing.division import FREE, check_possible, divided, members_of, number_of_bins, started
from wlb.packing.exchanges import Indices, Prefixes, Task

_SHARES = (4.0, 2.0, 1.4, 1.0, 0.7, 0.5, 0.35, 0.0)  # of the mean part beside the prefix: the rest of a piece
_FEW = 256  # documents: only up to this many, pieces larger than the mean part are tried
_COARSER = 3  # number of those shares
_EVEN = 1.01  # over the mean part if every prefix were computed once: good enough


def divided_once_shared(task: Task, parts: int, start: list[Indices] | None = None) -> list[Indices]:
    """Divide documents with prefixes into ``parts``, from ``start`` if given. Raises ``UserError`` if none is found."""
    check_possible(task._replace(max_tokens=None), parts)
    if task.equal_size and parts > 1:
        raise UserError(
            f"equal_size with prefixes needs one micro-batch for each rank, not {parts}; give groups and ranks"
        )
    best, lowest, shared = start or [], math.inf, _prefixes(task)
    mean = float(task.costs([np.arange(len(task.tokens))])[0]) / parts
    even = _EVEN * max(mean, float((task.prices + shared.prices[shared.group_of]).max()))
    for pieces, piece_of in () if start else _cuts(task, parts):
        first = started(pieces, parts) if len(pieces.tokens) >= parts else None
        if first is None:
            continue
        found = _documents(divided(pieces, parts, first), piece_of)
        cost = float(task.costs(found).max())
        if cost >= lowest and len(piece_of) > _FEW:
            break
        best, lowest = (found, cost) if cost < lowest else (best, lowest)
        if lowest <= even:
            break
    best = best or fewest_once_shared(task, 1)[1]
    if len(best) > parts:
        raise UserError(
            f"found no way to divide documents with prefixes into {parts} parts of max_tokens = {task.max_tokens}; "
            f"raise parts ({len(best)} would do) or max_tokens"
        )
    while len(best) < parts:  # halves keep to the limit
        halved = best.pop(int((task.costs(best) * [len(part) > 1 for part in best]).argmax()))
        best += [halved[half] for half in divided_once_shared(task.of(halved)._replace(max_tokens=None), 2)]
    return best


def fewest_once_shared(task: Task, multiple: int) -> tuple[int, list[Indices]]:
    """The smallest number of parts found, a multiple of ``multiple``, in which documents fit, and how."""
    shared, most = _prefixes(task), task.max_tokens or 1
    held = int(task.tokens.sum() + shared.tokens[np.unique(shared.group_of)].sum())
    tried: list[tuple[int, tuple[Task, Indices]]] = []
    for cut in _cuts(task, -(-held // most)):
        tried.append((number_of_bins(cut[0]), cut))
        if tried[-1][0] <= _EVEN * -(-held // most):
            break
    number, (pieces, piece_of) = min(tried, key=lambda found: found[0])
    return -(-number // multiple) * multiple, _documents(divided(pieces, number), piece_of)


def _prefixes(task: Task) -> Prefixes:
    assert task.prefixes is not None
    return task.prefixes


def _documents(parts: list[Indices], piece_of: Indices) -> list[Indices]:
    """The documents of parts of pieces."""
    owner = np.empty(sum(map(len, parts)), np.int64)
    owner[np.concatenate(parts)] = np.repeat(np.arange(len(parts)), [*map(len, parts)])
    return members_of(np.arange(len(piece_of)), owner[piece_of], len(parts))


def _cuts(task: Task, parts: int) -> Iterator[tuple[Task, Indices]]:
    """Pieces, a task like documents, and the piece of every document."""
    shared = _prefixes(task)
    present, group_of, sizes = np.unique(shared.group_of, return_inverse=True, return_counts=True)
    tokens, prices, rest = shared.tokens[present], shared.prices[present], np.bincount(group_of, task.prices)
    falling = np.split(np.lexsort((-task.prices, group_of)), np.cumsum(sizes)[:-1])
    dearest = task.prices[[documents[0] for documents in falling]]
    room = np.maximum((prices.sum() + rest.sum()) / parts - prices, dearest)
    space = (task.max_tokens or int(task.tokens.sum() + tokens.sum())) - tokens
    before = 0
    for share in _SHARES[0 if len(group_of) <= _FEW else _COARSER :]:
        number = np.where(prices > 0, np.ceil(rest / (share * room)), sizes) if share else sizes
        number = np.minimum(number, sizes).astype(np.int64)
        piece_of, groups = group_of.copy(), [*range(len(sizes))]
        for group in np.flatnonzero((number > 1) | (np.bincount(group_of, task.tokens) > space)).tolist():
            documents, count = falling[group], int(number[group])
            held, costs = task.tokens[documents].tolist(), task.prices[documents].tolist()
            while -1 in (owners := into_lightest(held, costs, [0.0] * count, [int(space[group])] * count)):
                count += 1
            piece_of[documents] = np.array([group, *range(len(groups), len(groups) + count - 1)])[owners]
            groups += [group] * (count - 1)
        if len(groups) > before:
            before = len(groups)
            of_pieces = tokens[groups] + np.bincount(piece_of, task.tokens).astype(np.int64)
            costs_of_pieces = np.maximum(prices[groups] + np.bincount(piece_of, task.prices), FREE)
            yield task._replace(tokens=of_pieces, prices=costs_of_pieces, prefixes=None), piece_of
