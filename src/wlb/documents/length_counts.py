"""How many documents have how many tokens: all that a plan's checks ask about a corpus as a whole.

The lengths themselves may be an array or lie on disk (``StoredLengths``), where they are read a few at a time. They are
counted in one pass, in memory that grows with the number of different lengths and not with that of documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 20  # documents counted together
_FEW = 1 << 12  # documents that are sorted to count them
_SHORT = 1 << 17  # tokens; lengths below are counted by their place in an array


class StoredLengths(Protocol):
    """Tokens per document of a store, read where they are asked for.

    ``lengths[documents]`` are those of an int64 array of documents, in any order, or of a slice of them. ``counts`` may
    take a pass over all of them when it is first asked for.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, documents: NDArray[np.int64] | slice, /) -> NDArray[np.int64]: ...

    @property
    def counts(self) -> LengthCounts: ...


# Tokens per document of one store: an array of shape (documents,), or what stands for one.
Lengths: TypeAlias = "NDArray[np.int64] | StoredLengths"
# Those of one store, or of every store of a mixture.
DocumentLengths: TypeAlias = "Lengths | Sequence[Lengths]"


@dataclass(frozen=True)
class LengthCounts:
    """``documents`` have ``lengths`` tokens each; both int64 of shape (different lengths,), lengths ascending."""

    lengths: NDArray[np.int64]
    documents: NDArray[np.int64]

    @property
    def total_documents(self) -> int:
        return int(self.documents.sum())

    @property
    def tokens(self) -> int:
        return int(self.lengths @ self.documents)

    @property
    def empty(self) -> int:
        """Documents without a token."""
        return self.total_documents - self.over(0)

    def over(self, limit: int) -> int:
        """Documents of more than ``limit`` tokens."""
        return int(self.documents[np.searchsorted(self.lengths, limit, side="right") :].sum())


def counts_of(lengths: Lengths) -> LengthCounts:
    """Those of an array, or those that a store keeps."""
    return counted([lengths]) if isinstance(lengths, np.ndarray) else lengths.counts


def counted(parts: Sequence[Lengths]) -> LengthCounts:
    """Count all lengths of ``parts``, one after another."""
    if len(parts) == 1 and len(parts[0]) < _FEW:
        return LengthCounts(*np.unique(parts[0][:], return_counts=True))
    short = np.zeros(0, np.int64)
    long: dict[int, int] = {}
    for lengths in parts:
        for _, chunk in chunks(lengths):
            found = np.bincount(chunk[chunk < _SHORT], minlength=len(short))
            found[: len(short)] += short
            short = found
            for length, count in zip(*np.unique(chunk[chunk >= _SHORT], return_counts=True), strict=True):
                long[int(length)] = long.get(int(length), 0) + int(count)
    few = np.flatnonzero(short)
    many = sorted(long.items())
    rest = np.array(many, np.int64).reshape(-1, 2)
    return LengthCounts(np.append(few, rest[:, 0]), np.append(short[few], rest[:, 1]))


def added_counts(parts: Sequence[LengthCounts]) -> LengthCounts:
    """Those of the documents of all ``parts``."""
    lengths, places = np.unique(np.concatenate([part.lengths for part in parts]), return_inverse=True)
    documents = np.zeros(len(lengths), np.int64)
    np.add.at(documents, places, np.concatenate([part.documents for part in parts]))
    return LengthCounts(lengths, documents)


def chunks(lengths: Lengths) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """All lengths, a chunk at a time, each with the number of its first document."""
    for first in range(0, len(lengths), _CHUNK):
        yield first, lengths[first : first + _CHUNK]
