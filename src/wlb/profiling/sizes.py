"""Which sizes are measured, and which are kept apart to test the profile on.

Profiled sizes are powers of a ratio; interpolation between them is exact for any cost a d^2 + b d. Held-out sizes
are random, so they fall between those, on no multiple of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError

_SMALLEST_DOCUMENT = 16
_SMALLEST_MICRO_BATCH = 64
_SMALLEST_MAX_LENGTH = 256  # leaves every axis at least two sizes
_LARGEST_MAX_LENGTH = 2**22  # beyond, one measurement takes hours
_HELD_OUT_DOCUMENTS = 12
_HELD_OUT_PIECES = 12
_HELD_OUT_MICRO_BATCHES = 8


class Piece(NamedTuple):
    """Queries ``start`` to ``stop`` of a segment, which attend the keys up to their own."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ProfiledSizes:
    """Sizes (tokens) that the profile holds."""

    documents: tuple[int, ...]
    micro_batches: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class HeldOutSizes:
    """Sizes (tokens) that the profile has not seen; ``micro_batches`` are segment lengths."""

    documents: tuple[int, ...]
    pieces: tuple[Piece, ...]
    micro_batches: tuple[tuple[int, ...], ...]


def profiled_sizes(max_length: int, quick: bool) -> ProfiledSizes:
    """Documents and micro-batches of up to ``max_length`` tokens; fewer of them if ``quick``.

    Raises ``UserError`` if ``max_length`` is too small for that, or too large.
    """
    if max_length < _SMALLEST_MAX_LENGTH:
        raise UserError(f"--max-length {max_length} is below {_SMALLEST_MAX_LENGTH} tokens; raise it")
    if max_length > _LARGEST_MAX_LENGTH:
        raise UserError(f"--max-length {max_length} is over {_LARGEST_MAX_LENGTH} tokens; lower it")
    ratio, table_ratio = (2.0, 8.0) if quick else (2**0.5, 4.0)
    return ProfiledSizes(
        documents=_powers(_SMALLEST_DOCUMENT, max_length, ratio),
        micro_batches=_powers(_SMALLEST_MICRO_BATCH, max_length, ratio**2),
        queries=_powers(_SMALLEST_DOCUMENT, max_length // 2, table_ratio),
        keys=_powers(_SMALLEST_MICRO_BATCH, max_length, table_ratio),
    )


def held_out_sizes(max_length: int, quick: bool) -> HeldOutSizes:
    """Random documents, context-parallel chunks of documents, and micro-batches of sampled documents."""
    random = np.random.default_rng(max_length)
    share = 2 if quick else 1

    def lengths(smallest: int, count: int) -> tuple[int, ...]:
        drawn = np.exp(random.uniform(np.log(smallest), np.log(max_length), count // share))
        return tuple(sorted({int(length) for length in drawn}))

    documents = lengths(_SMALLEST_DOCUMENT, _HELD_OUT_DOCUMENTS)
    pieces = tuple(_chunk(random, stop) for stop in lengths(_SMALLEST_MICRO_BATCH, _HELD_OUT_PIECES))
    tokens = random.integers(max_length // 2, max_length, _HELD_OUT_MICRO_BATCHES // share, endpoint=True)
    micro_batches = tuple(_fill(int(count), max_length, seed) for seed, count in enumerate(tokens))
    return HeldOutSizes(documents, pieces, micro_batches)


def _powers(smallest: int, largest: int, ratio: float) -> tuple[int, ...]:
    """About ``ratio`` apart, both ends included."""
    count = max(2, 1 + round(np.log(largest / smallest) / np.log(ratio)))
    return tuple(np.unique(np.rint(np.geomspace(smallest, largest, count)).astype(int)).tolist())


def _chunk(random: np.random.Generator, stop: int) -> Piece:
    """One of 4 to 32 chunks of a document, as sharding over 2 to 16 ranks cuts it, not the first."""
    chunks = 2 ** int(random.integers(2, 5, endpoint=True))
    size = max(1, stop // chunks)
    return Piece(stop - size, stop)


def _fill(tokens: int, context_window: int, seed: int) -> tuple[int, ...]:
    """Sampled documents one after another, the last one cut so that they add up to ``tokens``."""
    lengths = sample_lengths(tokens, context_window, seed)
    ends = np.minimum(np.cumsum(lengths), tokens)
    filled = np.diff(ends[: 1 + int(np.argmax(ends == tokens))], prepend=0)
    return tuple(filled.tolist())
