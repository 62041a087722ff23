"""A store of many shards: Megatron stores whose documents are counted through them, as one ``TokenStore``.

Tools that tokenize on many machines write a store for each task. Opening reads and checks every index once. Afterwards
a shard is mapped when one of its documents is asked for, and only a bounded number of them at a time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store.index import index_path, read_index
from wlb.documents.store.lengths import IndexLengths, StoredLengths
from wlb.documents.store.reader import TokenStore, check_store, identity_of_tokenizer
from wlb.documents.store.sources import StoreSource, source_name, store_prefixes
from wlb.documents.store.stamps import Stamps, check_unchanged, stamps_of
from wlb.errors import UserError

# Shards that stay mapped. An index is one file handle, a store up to two more; a process may often have 1,024.
_OPEN_INDEXES, _OPEN_STORES = 256, 128


@dataclass(frozen=True)
class Shard:
    """What opening found of a shard; ``name`` is its prefix from the directory of all shards on."""

    name: str
    stamps: Stamps
    documents: int
    tokens: int
    token_type: str
    vocab_size: int | None
    tokenizer: dict[str, Any] | None
    identity: str


class ShardedLengths:
    """``StoredLengths`` of shards of so many ``documents`` each, of which ``shard`` opens those of one."""

    def __init__(self, documents: Sequence[int], shard: Callable[[int], StoredLengths], tokens: int) -> None:
        self._ends = np.cumsum(documents, dtype=np.int64)
        self._shard = shard
        self.tokens = tokens

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, documents: NDArray[np.int64] | slice) -> NDArray[np.int64]:
        if not isinstance(documents, slice):
            return gathered(self._ends, documents, lambda number, of_shard: self._shard(number)[of_shard])
        start, stop, _ = documents.indices(len(self))
        lengths = np.empty(max(0, stop - start), np.int64)
        place = start
        while place < stop:
            number, in_shard = place_in(self._ends, place)
            end = min(stop, int(self._ends[number]))
            lengths[place - start : end - start] = self._shard(number)[in_shard : in_shard + end - place]
            place = end
        return lengths


def place_in(ends: NDArray[np.int64], document: int) -> tuple[int, int]:
    """Which of the stores that end before documents ``ends`` has ``document``, and as which of its own."""
    number = int(np.searchsorted(ends, document, side="right"))
    return number, document - int(ends[number - 1] if number else 0)


def gathered(
    ends: NDArray[np.int64],
    documents: NDArray[np.int64],
    lengths_of: Callable[[int, NDArray[np.int64]], NDArray[np.int64]],
) -> NDArray[np.int64]:
    """Lengths of ``documents`` in any order, counted through stores that end before documents ``ends``.

    ``lengths_of`` reads those of one store: its number, and documents as it counts them.
    """
    numbers = np.searchsorted(ends, documents, side="right")
    order = np.argsort(numbers, kind="stable")
    lengths = np.empty(len(documents), np.int64)
    changes = np.flatnonzero(np.diff(numbers[order], prepend=-1, append=len(ends)))
    for start, stop in pairwise(changes.tolist()):
        chosen = order[start:stop]
        number = int(numbers[chosen[0]])
        lengths[chosen] = lengths_of(number, documents[chosen] - (ends[number - 1] if number else 0))
    return lengths


class ShardedStore(TokenStore):
    """``shards`` below ``root`` as one store, which ``open_store`` makes; a shard without documents is left out.

    Raises ``UserError`` where no shard has documents, and where two have another token type, tokenizer or vocabulary.
    """

    def __init__(self, source: StoreSource, root: Path, shards: Sequence[Shard]) -> None:
        self._arguments = source, root, shards
        self.prefix = Path(source_name(source))  # for messages
        self._root = root
        self._shards = [shard for shard in shards if shard.documents]
        if not self._shards:
            raise UserError(f"{self.prefix} holds no documents in {len(shards)} token stores")
        self._check_alike()
        self._ends = np.cumsum([shard.documents for shard in self._shards], dtype=np.int64)
        self._lengths_at = lru_cache(_OPEN_INDEXES)(self._open_lengths)
        self._store_at = lru_cache(_OPEN_STORES)(self._open_store)
        documents = [shard.documents for shard in self._shards]
        self.stored_lengths = ShardedLengths(documents, lambda number: self._lengths_at(number), self.tokens)
        vocabularies = {shard.vocab_size for shard in self._shards}
        self._vocab_size = vocabularies.pop() if len(vocabularies) == 1 else None
        tokenizers = (shard.tokenizer for shard in self._shards if shard.tokenizer is not None)
        self.sidecar = {"tokenizer": next(tokenizers, None)}

    @classmethod
    def of(cls, source: StoreSource, prefixes: Sequence[Path]) -> ShardedStore:
        """The stores at ``prefixes``, in this order, which ``source`` names."""
        root = Path(os.path.commonpath([os.path.abspath(prefix.parent) for prefix in prefixes]))
        names = (os.path.relpath(prefix, root).replace(os.sep, "/") for prefix in prefixes)
        return cls(source, root, [*map(_described, names, prefixes)])

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return ShardedStore, self._arguments

    def __len__(self) -> int:
        return int(self._ends[-1])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return self.stored_lengths[:]

    def lengths_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        return gathered(self._ends, documents, lambda number, of_one: self._lengths_at(number).index.lengths(of_one))

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self._shards)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self._shards[0].token_type)

    @cached_property
    def identity(self) -> str:
        """sha256 in hex over names, from the directory of all on, and identities of the shards, in their order."""
        digest = hashlib.sha256()
        for shard in self._shards:
            digest.update(f"{shard.name}\0{shard.identity}\n".encode())
        return digest.hexdigest()

    def read(self, document: int, start: int = 0, length: int | None = None) -> NDArray[Any]:
        if not 0 <= document < len(self):
            raise UserError(f"document {document} is not in {self.prefix}, which holds {len(self)} documents")
        number, of_shard = place_in(self._ends, document)
        return self._store_at(number).read(of_shard, start, length)

    def loss_mask(self, document: int, start: int, length: int) -> NDArray[np.bool_] | None:
        number, of_shard = place_in(self._ends, document)
        masked = self._shards[number].stamps[2] is not None
        return self._store_at(number).loss_mask(of_shard, start, length) if masked else None

    def check_labels(self) -> None:
        """Raise ``UserError`` unless some shard has a token that follows another and is a label."""
        if not any(self._store_at(number).has_labels() for number in range(len(self._shards))):
            raise UserError(f"no shard of {self.prefix} has a label, so nothing would be learnt; prepare it again")

    def check_unchanged(self, documents: NDArray[np.int64]) -> None:
        for number in np.unique(np.searchsorted(self._ends, documents, side="right")).tolist():
            self._checked(number)

    def _prefix(self, shard: Shard) -> Path:
        return self._root / shard.name

    def _check_alike(self) -> None:
        said: list[tuple[str, Callable[[Shard], Any]]] = [
            ("the token type", lambda shard: shard.token_type),
            ("a vocabulary of", lambda shard: shard.vocab_size),
            ("the tokenizer", lambda shard: identity_of_tokenizer(shard.tokenizer)),
        ]
        for what, value in said:
            known = [shard for shard in self._shards if value(shard) is not None]
            for shard in known:
                if value(shard) != value(known[0]):
                    raise UserError(
                        f"shards of a store must be alike: {self._prefix(shard)} has {what} {value(shard)}, "
                        f"{self._prefix(known[0])} {value(known[0])}; prepare all with the same tokenizer"
                    )

    def _open_lengths(self, number: int) -> IndexLengths:
        prefix = self._checked(number)
        return IndexLengths(read_index(index_path(prefix), sample=False))  # all of it was checked at first

    def _open_store(self, number: int) -> TokenStore:
        prefix = self._checked(number)
        return TokenStore.with_index(prefix, self._lengths_at(number).index, self._shards[number].stamps)

    def _checked(self, number: int) -> Path:
        """The prefix of a shard. Raises ``UserError`` where the shard has changed."""
        shard = self._shards[number]
        check_unchanged(self._prefix(shard), shard.stamps)
        return self._prefix(shard)


def _described(name: str, prefix: Path) -> Shard:
    """Open a shard, which has no documents where a task of the tool that wrote it had none."""
    stamps = stamps_of(prefix)
    store = TokenStore.with_index(prefix, read_index(index_path(prefix), may_be_empty=True), stamps)
    found = len(store), store.tokens, store.dtype.str, store.vocab_size, store.tokenizer, store.identity
    return Shard(name, stamps, *found)


def open_store(source: StoreSource) -> TokenStore:
    """The store that ``source`` names; all of them as one where it is a directory, a glob or a list.

    Documents are counted through the shards, sorted by name. Raises ``UserError`` as ``TokenStore.open`` for any shard,
    where ``source`` names none or one twice, and as ``ShardedStore``.
    """
    prefixes = store_prefixes(source)
    return TokenStore.open(prefixes[0]) if len(prefixes) == 1 else ShardedStore.of(source, prefixes)


def check_stores(source: StoreSource) -> TokenStore:
    """As ``check_store``, of every shard that ``source`` names; the store."""
    store = open_store(source)
    if not isinstance(store, ShardedStore):
        return check_store(store.prefix)
    for shard in store._shards:
        check_store(store._prefix(shard))
    return store
