"""Tokens per document: in an array, or in a store's index, where they are read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store.index import TokenIndex

_CHUNK = 1 << 14  # documents looked at together


class StoredLengths(Protocol):
    """Tokens per document of a store, and ``tokens`` of all of them.

    ``lengths[documents]`` are those of an int64 array of documents, in any order, or of a slice of them.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, documents: NDArray[np.int64] | slice, /) -> NDArray[np.int64]: ...

    @property
    def tokens(self) -> int: ...


# Tokens per document of one store: an array of shape (documents,), or what stands for one.
Lengths: TypeAlias = "NDArray[np.int64] | StoredLengths"
# Those of one store, or of every store of a mixture.
DocumentLengths: TypeAlias = "Lengths | Sequence[Lengths]"


class IndexLengths:
    """``StoredLengths`` of an index."""

    def __init__(self, index: TokenIndex) -> None:
        self.index = index

    def __len__(self) -> int:
        return self.index.documents

    def __getitem__(self, documents: NDArray[np.int64] | slice) -> NDArray[np.int64]:
        if isinstance(documents, slice):
            start, stop, _ = documents.indices(len(self))
            return self.index.lengths_between(start, stop)
        return self.index.lengths(documents)

    @property
    def tokens(self) -> int:
        return self.index.tokens


def tokens_of(lengths: DocumentLengths) -> int:
    """Tokens of all documents; of a store its index says so."""
    if isinstance(lengths, Sequence):
        return sum(map(tokens_of, lengths))
    return int(lengths.sum()) if isinstance(lengths, np.ndarray) else lengths.tokens


def documents_in(lengths: DocumentLengths) -> int:
    """How many documents there are, empty ones too."""
    return sum(map(len, lengths)) if isinstance(lengths, Sequence) else len(lengths)


def chunks(lengths: Lengths) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """All lengths, a chunk at a time, each with the number of its first document."""
    for first in range(0, len(lengths), _CHUNK):
        yield first, lengths[first : first + _CHUNK]
