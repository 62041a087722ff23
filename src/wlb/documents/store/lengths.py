"""The lengths of a store's documents, read from its index where they are asked for."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wlb.documents.length_counts import LengthCounts, counted
from wlb.documents.store.index import TokenIndex, read_index


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

    @cached_property
    def counts(self) -> LengthCounts:
        """Takes a pass over the index, and raises ``UserError`` where that finds it damaged."""
        if self.index.is_checked_whole:
            return counted([self])
        return counted([IndexLengths(read_index(self.index.path, whole=True, sample=False))])  # which reads ahead
