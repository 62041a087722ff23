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
from wlb.packing.bins import best_fit
from wlb.packing.division import FREE, check_possible, divided, number_of_bins, started
from wlb.packing.exchanges import Indices, Task, documents_of, members_of, owners_of

_COARSE = (4.0, 2.0, 1.4)  # of the mean part beside the prefix, which the rest of a piece fills: for few documents
_SHARES = (1.0, 0.7, 0.5, 0.35, 0.0)
_FEW = 256  # documents
_EVEN = 1.01  # over the mean part if every prefix were computed once: good enough


def divided_once_shared(task: Task, parts: int, start: list[Indices] | None = None) -> list[Indices]:
    """Divide documents with prefixes into ``parts``, from ``start`` if given. Raises ``UserError`` if none is found."""
    check_possible(task._replace(max_tokens=None), parts)
    if task.equal_size and parts > 1:
        raise UserError(f"equal_size with prefixes needs one micro-batch for each rank, not {parts}; give ranks")
    assert task.prefixes is not None
    best, lowest, dearest = start or [], math.inf, (task.prices + task.prefixes.prices[task.prefixes.group_of]).max()
    even = _EVEN * max(task.costs([np.arange(len(task.tokens))])[0] / parts, dearest)
    shares = _COARSE + _SHARES if len(task.tokens) <= _FEW else _SHARES
    for pieces, piece_of in () if start else _cuts(task, parts, shares):
        if len(pieces.tokens) < parts or (first := started(pieces, parts)) is None:
            continue
        found = documents_of(divided(pieces, parts, first), piece_of)
        cost, before = float(task.costs(found).max()), lowest
        best, lowest = (found, cost) if cost < lowest else (best, lowest)
        if lowest <= even or (cost >= before and len(piece_of) > _FEW):
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
    assert task.prefixes is not None
    held = int(task.tokens.sum() + task.prefixes.tokens[np.unique(task.prefixes.group_of)].sum())
    found = [(number_of_bins(cut[0]), cut) for cut in _cuts(task, max(1, -(-held // (task.max_tokens or 1))), (1.0,))]
    number, (pieces, piece_of) = min(found, key=lambda pair: pair[0])
    return -(-number // multiple) * multiple, documents_of(divided(pieces, number), piece_of)


def _cuts(task: Task, parts: int, shares: tuple[float, ...]) -> Iterator[tuple[Task, Indices]]:
    """Pieces, a task like documents, and the piece of every document; under a limit, the last cut fills parts."""
    assert task.prefixes is not None
    present, group_of, sizes = np.unique(task.prefixes.group_of, return_inverse=True, return_counts=True)
    tokens, prices = task.prefixes.tokens[present], task.prefixes.prices[present]
    rest, rest_tokens = (np.bincount(group_of, amounts) for amounts in (task.prices, task.tokens))
    falling = np.split(np.lexsort((-task.prices, group_of)), np.cumsum(sizes)[:-1])
    room = np.maximum((prices.sum() + rest.sum()) / parts - prices, task.prices[[own[0] for own in falling]])
    space = (task.max_tokens or int(task.tokens.sum() + tokens.sum()) + 1) - tokens

    def cut(pieces: list[tuple[int, Indices]]) -> tuple[Task, Indices]:
        groups, piece_of = [group for group, _ in pieces], owners_of([own for _, own in pieces])
        held = tokens[groups] + np.bincount(piece_of, task.tokens).astype(np.int64)
        costs = np.maximum(prices[groups] + np.bincount(piece_of, task.prices), FREE)
        return task._replace(tokens=held, prices=costs, prefixes=None), piece_of

    before = 0
    for share in shares:
        number = np.where(prices > 0, np.ceil(rest / (share * room)), sizes) if share else sizes
        number = np.maximum(np.minimum(number, sizes), -(-rest_tokens // space)).astype(np.int64)
        pieces: list[tuple[int, Indices]] = []
        for group, (own, count, most) in enumerate(zip(falling, number.tolist(), space.tolist(), strict=True)):
            held, costs = task.tokens[own].tolist(), task.prices[own].tolist()
            while count > 1 and -1 in (owners := into_lightest(held, costs, [0.0] * count, [most] * count)):
                count += 1
            pieces += [(group, part) for part in (members_of(own, owners, count) if count > 1 else [own])]
        if len(pieces) > before:
            before = len(pieces)
            yield cut(pieces)
    if task.max_tokens is not None:
        yield cut(_filled(task, falling, tokens.tolist(), task.max_tokens))


def _filled(task: Task, falling: list[Indices], prefixes: list[int], most: int) -> list[tuple[int, Indices]]:
    """Pieces, with their groups, of documents that fill one part after the other."""
    pieces, room = [], 0
    for group, (own, prefix) in enumerate(zip(falling, prefixes, strict=True)):
        held, fits = task.tokens[own].tolist(), []
        room -= prefix
        for length in held:
            fits.append(length <= room)
            room -= length * fits[-1]
        left = own[~np.array(fits)]
        pieces += [(group, own[fits])] if any(fits) else []
        if len(left):
            bins = [left[part] for part in best_fit(task.tokens[left].tolist(), most - prefix)]
            pieces += [(group, part) for part in bins]
            room = most - prefix - min(int(task.tokens[part].sum()) for part in bins)
    return pieces
