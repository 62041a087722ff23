"""Tokens per document: in an array, or in a store's index, where they are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

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


def tokens_of(lengths: DocumentLengths) -> int:
    """Tokens of all documents; of a store its index says so."""
    if isinstance(lengths, Sequence):
        return sum(map(tokens_of, lengths))
    return int(lengths.sum()) if isinstance(lengths, np.ndarray) else lengths.tokens


def documents_in(lengths: DocumentLengths) -> int:
    """How many documents there are, empty ones too."""
    return sum(map(len, lengths)) if isinstance(lengths, Sequence) else len(lengths)


def chunks(between: Callable[[int, int], NDArray[np.int64]], documents: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The lengths ``between`` two of ``documents`` documents, a chunk at a time, each with the number of its first."""
    for first in range(0, documents, _CHUNK):
        yield first, between(first, min(first + _CHUNK, documents))
