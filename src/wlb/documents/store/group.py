"""The stores of a job opened as one: documents are counted through all of them, in order.

A store is one Megatron store or many, its shards: tools that tokenize on many machines write one for each task. Opening
reads a sample of every index. Afterwards a shard is mapped when one of its documents is asked for, and only a bounded
number of them at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store.index import index_path, read_index
from wlb.documents.store.lengths import DocumentLengths
from wlb.documents.store.reader import TokenStore, check_store
from wlb.documents.store.sources import StoreSource, refuse_twice, store_prefixes
from wlb.documents.store.stamps import Stamps, check_unchanged
from wlb.errors import UserError

_OPEN_SHARDS = 128  # that stay mapped; each takes up to three file handles, of which a process may often have 1,024


class _Shard(NamedTuple):
    """What opening found of a shard; ``kept`` is the shard itself where it is a whole store."""

    prefix: Path
    stamps: Stamps
    documents: int
    tokens: int
    vocab_size: int | None
    tokenizer: dict[str, Any] | None
    identity: str
    kept: TokenStore | None = None

    @classmethod
    def of(cls, store: TokenStore) -> _Shard:
        found = len(store), store.tokens, store.vocab_size, store.tokenizer, store.identity
        return cls(store.prefix, store.stamps, *found)


class StoreGroup:
    """``stores`` as one ``TokenStore``; each is opened, or its shards are named. Safe to share between threads.

    Shards without documents are left out. Raises ``UserError`` where a store has none with documents, where its shards
    have different vocabularies, and where any two were prepared with different tokenizers.
    """

    def __init__(self, stores: Sequence[TokenStore | Sequence[Path]]) -> None:
        self._arguments = (stores,)
        self._shards: list[_Shard] = []
        self._ends_of_stores: list[int] = [0]  # in shards
        for store in stores:
            shards = [_Shard.of(store)._replace(kept=store)] if isinstance(store, TokenStore) else [*map(_shard, store)]
            self._shards += (shard for shard in shards if shard.documents)
            if len(self._shards) == self._ends_of_stores[-1]:
                raise UserError(f"{_name(shards)} holds no documents in {len(shards)} token stores")
            self._ends_of_stores.append(len(self._shards))
        for shards in self._stores:
            _check_alike([(shard, "a vocabulary of", shard.vocab_size) for shard in shards])
        _check_alike([(shard, "the tokenizer", identity_of(shard.tokenizer)) for shard in self._shards])
        self._ends = np.cumsum([0, *(shard.documents for shard in self._shards)], dtype=np.int64)
        self._mapped = lru_cache(_OPEN_SHARDS)(self._map)

    @classmethod
    def open(cls, sources: Sequence[StoreSource]) -> StoreGroup:
        """The stores that ``sources`` name: each by a prefix, a directory, a glob or a list, see ``store_prefixes``.

        Raises ``UserError`` as ``TokenStore.open`` for any shard, and where one is named twice.
        """
        prefixes = [store_prefixes(source) for source in sources]
        if len(sources) > 1:
            refuse_twice([prefix for shards in prefixes for prefix in shards])
        return cls([TokenStore.open(shards[0]) if len(shards) == 1 else shards for shards in prefixes])

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return StoreGroup, self._arguments

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def _stores(self) -> list[list[_Shard]]:
        return [self._shards[start:stop] for start, stop in pairwise(self._ends_of_stores)]

    @property
    def firsts(self) -> list[int]:
        """The first document of every store, and after the last one the number of all documents."""
        firsts: list[int] = self._ends[self._ends_of_stores].tolist()
        return firsts

    @property
    def prefix(self) -> str:
        """What names the stores in messages."""
        return " + ".join(map(_name, self._stores))

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self._shards)

    @property
    def is_remote(self) -> bool:
        """Whether tokens of some store come from a server."""
        return any(shard.kept is not None and shard.kept.is_remote for shard in self._shards)

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below this; None where a store does not say."""
        sizes = [shard.vocab_size for shard in self._shards]
        return None if None in sizes else max(size for size in sizes if size is not None)

    @property
    def tokenizer(self) -> dict[str, Any] | None:
        """As of ``TokenStore``, of the first shard that says it."""
        return next((shard.tokenizer for shard in self._shards if shard.tokenizer is not None), None)

    @property
    def tokenizer_identity(self) -> dict[str, Any] | None:
        """Equal for stores of the same tokenizer."""
        return identity_of(self.tokenizer)

    @cached_property
    def identity(self) -> str:
        """sha256 in hex over the identities of the shards of each store, in their order."""
        identities = [" ".join(shard.identity for shard in shards) for shards in self._stores]
        return hashlib.sha256("\n".join(identities).encode()).hexdigest()

    @property
    def stored_lengths(self) -> DocumentLengths:
        """What a stream of these documents needs: lengths of one store, or of each in a list."""
        tokens = [sum(shard.tokens for shard in shards) for shards in self._stores]
        of_stores = [
            GroupLengths(self, first, stop, total)
            for (first, stop), total in zip(pairwise(self.firsts), tokens, strict=True)
        ]
        return of_stores[0] if len(of_stores) == 1 else of_stores

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every document, shape (documents,): 8 bytes for each in memory."""
        return self.lengths_between(0, len(self))

    def lengths_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of some documents, in any order; int64 of their shape."""
        lengths = np.empty(len(documents), np.int64)
        for shard, chosen, of_shard in self._by_shard(documents):
            lengths[chosen] = self._mapped(shard).lengths_of(of_shard)
        return lengths

    def lengths_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens of the documents from ``start`` to ``stop``."""
        parts = [np.empty(0, np.int64)]
        while start < stop:
            shard, document = self._place(start)
            end = min(stop, int(self._ends[shard + 1]))
            parts.append(self._mapped(shard).lengths_between(document, document + end - start))
            start = end
        return np.concatenate(parts)

    def tokens_by_store(self, documents: NDArray[np.int64], tokens: NDArray[np.int64]) -> tuple[int, ...]:
        """How many of ``tokens`` each store has, one number for each of ``documents`` (ids of any epoch)."""
        numbers = np.searchsorted(self.firsts, documents % len(self), side="right") - 1
        return tuple(np.bincount(numbers, tokens, len(self._stores)).astype(np.int64).tolist())

    def check_unchanged(self, documents: NDArray[np.int64]) -> None:
        """As ``TokenStore.check_unchanged``, of the shards that hold ``documents``."""
        for number, _, _ in self._by_shard(documents):
            shard = self._shards[number]
            check_unchanged(shard.prefix, shard.stamps)

    def read(self, document: int, start: int = 0, length: int | None = None) -> NDArray[Any]:
        """As ``TokenStore.read``."""
        if not 0 <= document < len(self):
            raise UserError(f"document {document} is not in {self.prefix}, which holds {len(self)} documents")
        shard, of_shard = self._place(document)
        return self._mapped(shard).read(of_shard, start, length)

    def loss_mask(self, document: int, start: int, length: int) -> NDArray[np.bool_] | None:
        """As ``TokenStore.loss_mask``: shards with a mask and without may be mixed."""
        shard, of_shard = self._place(document)
        return self._mapped(shard).loss_mask(of_shard, start, length)

    def check_labels(self) -> None:
        """Raise ``UserError`` unless every store has a token that follows another and is a label.

        Reads masks, where there are any, up to the first such token.
        """
        for start, stop in pairwise(self._ends_of_stores):
            if not any(self._mapped(shard).has_labels() for shard in range(start, stop)):
                raise UserError(
                    f"token store {_name(self._shards[start:stop])} has no label (PREFIX.mask), or documents of one "
                    "token only, so nothing would be learnt; prepare it again"
                )

    def check_content(self) -> None:
        """``check_store`` of every shard."""
        for shard in self._shards:
            check_store(shard.prefix)

    def _place(self, document: int) -> tuple[int, int]:
        """The shard that has ``document``, and as which of its own."""
        shard = int(np.searchsorted(self._ends, document, side="right")) - 1
        return shard, document - int(self._ends[shard])

    def _by_shard(self, documents: NDArray[np.int64]) -> list[tuple[int, NDArray[np.bool_], NDArray[np.int64]]]:
        """The shards that have any of ``documents``, which of them, and as which of their own."""
        shards = np.searchsorted(self._ends, documents, side="right") - 1
        found = [(shard, shards == shard) for shard in np.unique(shards).tolist()]
        return [(shard, chosen, documents[chosen] - self._ends[shard]) for shard, chosen in found]

    def _map(self, number: int) -> TokenStore:
        """Map a shard again, of which a sample was checked at first."""
        shard = self._shards[number]
        if shard.kept is not None:
            return shard.kept
        check_unchanged(shard.prefix, shard.stamps)
        return TokenStore.with_index(shard.prefix, read_index(index_path(shard.prefix), sample=False), shard.stamps)


class GroupLengths:
    """``StoredLengths`` of the store of a group that has its documents from ``first`` to ``stop``."""

    def __init__(self, group: StoreGroup, first: int, stop: int, tokens: int) -> None:
        self._group, self._first, self._stop = group, first, stop
        self.tokens = tokens

    def __len__(self) -> int:
        return self._stop - self._first

    def __getitem__(self, documents: NDArray[np.int64] | slice) -> NDArray[np.int64]:
        if isinstance(documents, slice):
            start, stop, _ = documents.indices(len(self))
            return self._group.lengths_between(self._first + start, self._first + stop)
        return self._group.lengths_of(self._first + documents)


def identity_of(tokenizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """What tells a sidecar's ``tokenizer`` from others: all but its name, which is only that of a file."""
    return {key: value for key, value in tokenizer.items() if key != "name"} if tokenizer else None


def _shard(prefix: Path) -> _Shard:
    return _Shard.of(TokenStore.open(prefix, may_be_empty=True))


def _name(shards: Sequence[_Shard]) -> str:
    first, *others = shards
    return f"{first.prefix} and {len(others)} more" if others else str(first.prefix)


def _check_alike(said: Sequence[tuple[_Shard, str, Any]]) -> None:
    """Raise ``UserError`` where shards say different things."""
    known = [(shard, what, value) for shard, what, value in said if value is not None]
    for shard, what, value in known:
        if value != known[0][2]:
            raise UserError(
                f"{shard.prefix} has {what} {value}, {known[0][0].prefix} {known[0][2]}; prepare all with the "
                "same tokenizer"
            )
