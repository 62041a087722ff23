"""The stores of a job, opened as one: its documents are those of all its stores, one store after another."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store.lengths import DocumentLengths
from wlb.documents.store.reader import TokenStore
from wlb.documents.store.shards import gathered, open_store
from wlb.documents.store.sources import StoreSource, refuse_twice, store_prefixes
from wlb.errors import UserError


class StoreMixture:
    """``stores`` as one ``TokenStore``; safe to share between threads.

    Raises ``UserError`` where two of them were prepared with different tokenizers.
    """

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        self.stores = tuple(stores)
        self._firsts: list[int] = np.cumsum([0, *map(len, stores)]).tolist()
        known = [store for store in stores if store.tokenizer is not None]
        for store in known:
            if store.tokenizer_identity != known[0].tokenizer_identity:
                raise UserError(
                    f"data.mixture: {store.prefix} was prepared with another tokenizer than {known[0].prefix}; prepare "
                    "all stores with the same"
                )
        self.tokenizer: dict[str, Any] | None = known[0].tokenizer if known else None
        self.tokenizer_identity: dict[str, Any] | None = known[0].tokenizer_identity if known else None

    def __len__(self) -> int:
        return self._firsts[-1]

    @property
    def prefix(self) -> str:
        """The prefixes of the stores, for messages."""
        return " + ".join(str(store.prefix) for store in self.stores)

    def lengths_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """As ``TokenStore.lengths_of``, of documents counted through all stores."""
        ends = np.array(self._firsts[1:])
        return gathered(ends, documents, lambda number, of_store: self.stores[number].lengths_of(of_store))

    @property
    def is_remote(self) -> bool:
        """Whether tokens of some store come from a server."""
        return any(store.is_remote for store in self.stores)

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below this; None where a store does not say."""
        sizes = [store.vocab_size for store in self.stores]
        known = [size for size in sizes if size is not None]
        return max(known) if len(known) == len(sizes) else None

    def tokens_by_store(self, documents: NDArray[np.int64], tokens: NDArray[np.int64]) -> tuple[int, ...]:
        """How many of ``tokens`` each store has, one number for each of ``documents`` (ids of any epoch)."""
        numbers = np.searchsorted(self._firsts, documents % len(self), side="right") - 1
        return tuple(np.bincount(numbers, tokens, len(self.stores)).astype(np.int64).tolist())

    @cached_property
    def identity(self) -> str:
        """sha256 in hex over the identities of the stores, in their order."""
        return hashlib.sha256("".join(store.identity for store in self.stores).encode()).hexdigest()

    def check_unchanged(self, documents: NDArray[np.int64]) -> None:
        """As ``TokenStore.check_unchanged``, of documents counted through all stores."""
        numbers = np.searchsorted(self._firsts, documents, side="right") - 1
        for number in np.unique(numbers).tolist():
            self.stores[number].check_unchanged(documents[numbers == number] - self._firsts[number])

    def read(self, document: int, start: int = 0, length: int | None = None) -> NDArray[Any]:
        """As ``TokenStore.read``, of a document counted through all stores."""
        store, index = self._place(document)
        return store.read(index, start, length)

    def loss_mask(self, document: int, start: int, length: int) -> NDArray[np.bool_] | None:
        """As ``TokenStore.loss_mask``: stores with a mask and without may be mixed."""
        store, index = self._place(document)
        return store.loss_mask(index, start, length)

    def check_labels(self) -> None:
        """As ``TokenStore.check_labels``, for every store."""
        for store in self.stores:
            store.check_labels()

    def _place(self, document: int) -> tuple[TokenStore, int]:
        number = bisect_right(self._firsts, document, hi=len(self.stores)) - 1
        return self.stores[number], document - self._firsts[number]


TrainedStore: TypeAlias = TokenStore | StoreMixture


def document_lengths(store: TrainedStore) -> DocumentLengths:
    """What a ``DocumentStream`` or a ``MixtureStream`` of ``store`` needs."""
    if isinstance(store, StoreMixture):
        return [of_mixture.stored_lengths for of_mixture in store.stores]
    return store.stored_lengths


def open_stores(sources: Sequence[StoreSource]) -> TrainedStore:
    """The store of a job, or its stores as one. Raises ``UserError`` as ``open_store`` and ``StoreMixture``."""
    if len(sources) > 1:
        refuse_twice([prefix for source in sources for prefix in store_prefixes(source)])
    stores = [open_store(source) for source in sources]
    return stores[0] if len(stores) == 1 else StoreMixture(stores)
