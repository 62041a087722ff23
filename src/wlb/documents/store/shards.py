"""A store of many shards: Megatron stores whose documents are counted through them, as one ``TokenStore``.

Tools that tokenize on many machines write a store for each task. What opening has to know of them is kept beside them
in a manifest, ``shards-KEY.lengths``, whose key follows from how the store is named. For every shard it has the size
and time of its files, its documents, tokens, token type, tokenizer and identity, and how many documents have how many
tokens. So a shard is read and checked when it is first met, and again when one of its files has changed. Where the
directory cannot be written, every process reads all shards. Afterwards a shard is mapped when one of its documents is
asked for, and only a bounded number of them at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.length_counts import LengthCounts, StoredLengths, added_counts, counted
from wlb.documents.store.index import bin_path, index_path, read_index
from wlb.documents.store.lengths import IndexLengths, keep_arrays
from wlb.documents.store.reader import TokenStore, check_store, identity_of_tokenizer
from wlb.documents.store.sources import StoreSource, source_name, source_parts, store_prefixes
from wlb.errors import UserError

# Shards that stay mapped. An index is one file handle, a store up to two more; a process may often have 1,024.
_OPEN_INDEXES, _OPEN_STORES = 256, 128
_FORMAT = "wlb-shards/1"


@dataclass(frozen=True)
class Shard:
    """What the manifest has of a shard, beside its counts.

    ``name`` is its prefix from the directory of all shards on. ``stamps`` are size and time of change of .idx, .bin,
    .mask and .json, None where there is no such file.
    """

    name: str
    stamps: list[list[int] | None]
    documents: int
    tokens: int
    token_type: str
    one_sequence_each: bool = False
    masked: bool = False
    vocab_size: int | None = None
    tokenizer: dict[str, Any] | None = None
    identity: str = ""


class ShardedLengths:
    """``StoredLengths`` of shards of so many ``documents`` each, of which ``shard`` opens those of one.

    ``counts`` are those of all, where they are known.
    """

    def __init__(
        self, documents: Sequence[int], shard: Callable[[int], StoredLengths], counts: LengthCounts | None = None
    ) -> None:
        self._ends = np.cumsum(documents, dtype=np.int64)
        self._shard = shard
        self._counts = counts

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

    @property
    def counts(self) -> LengthCounts:
        return self._counts or counted([self])


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

    def __init__(self, source: StoreSource, root: Path, shards: Sequence[Shard], counts: LengthCounts) -> None:
        self._arguments = source, root, shards, counts
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
        self.stored_lengths = ShardedLengths(documents, lambda number: self._lengths_at(number), counts)
        vocabularies = {shard.vocab_size for shard in self._shards}
        self._vocab_size = vocabularies.pop() if len(vocabularies) == 1 else None
        tokenizers = (shard.tokenizer for shard in self._shards if shard.tokenizer is not None)
        self.sidecar = {"tokenizer": next(tokenizers, None)}

    @classmethod
    def of(cls, source: StoreSource, prefixes: Sequence[Path]) -> ShardedStore:
        """The stores at ``prefixes``, in this order, which ``source`` names."""
        root = Path(os.path.commonpath([os.path.abspath(prefix.parent) for prefix in prefixes]))
        return cls(source, root, *_ManifestFile(source, root).of(prefixes))

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

    @property
    def whole_identity(self) -> str:
        """That of older versions, which had no such stores."""
        return self.identity

    def read(self, document: int, start: int = 0, length: int | None = None) -> NDArray[Any]:
        if not 0 <= document < len(self):
            raise UserError(f"document {document} is not in {self.prefix}, which holds {len(self)} documents")
        number, of_shard = place_in(self._ends, document)
        return self._store_at(number).read(of_shard, start, length)

    def loss_mask(self, document: int, start: int, length: int) -> NDArray[np.bool_] | None:
        number, of_shard = place_in(self._ends, document)
        return self._store_at(number).loss_mask(of_shard, start, length) if self._shards[number].masked else None

    def check_labels(self) -> None:
        """Raise ``UserError`` unless some shard has a token that follows another and is a label."""
        if not any(self._store_at(number).has_labels() for number in range(len(self._shards))):
            raise UserError(f"no shard of {self.prefix} has a label, so nothing would be learnt; prepare it again")

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
        shard = self._shards[number]
        path = index_path(self._prefix(shard))
        self._check_unchanged(shard, _stamp(path) == shard.stamps[0])
        lengths = IndexLengths(read_index(path, sample=False))  # all of it was checked for the manifest
        lengths.one_sequence_each = shard.one_sequence_each
        return lengths

    def _open_store(self, number: int) -> TokenStore:
        shard = self._shards[number]
        self._check_unchanged(shard, _stamp(bin_path(self._prefix(shard))) == shard.stamps[1])
        return TokenStore.with_index(self._prefix(shard), self._lengths_at(number).index)

    def _check_unchanged(self, shard: Shard, unchanged: bool) -> None:
        if not unchanged:
            raise UserError(f"{self._prefix(shard)} has changed since it was opened with {self.prefix}; start again")


class _ManifestFile:
    """What is kept of the shards that ``source`` names below ``root``."""

    def __init__(self, source: StoreSource, root: Path) -> None:
        self._root = root
        spelled = "\n".join(os.path.relpath(part, root) for part in source_parts(source))
        key = hashlib.sha256(spelled.encode(errors="surrogateescape")).hexdigest()[:8]
        self._path = root / f"shards-{key}.lengths"

    def of(self, prefixes: Sequence[Path]) -> tuple[list[Shard], LengthCounts]:
        """The shards at ``prefixes`` and the counts of all; reads those that are new or have changed."""
        names = [os.path.relpath(prefix, self._root).replace(os.sep, "/") for prefix in prefixes]
        current = {name: _stamps(prefix) for name, prefix in zip(names, prefixes, strict=True)}
        kept: dict[str, tuple[Shard, LengthCounts]] = {}
        with (
            suppress(OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile),
            np.load(self._path) as file,
        ):
            shards = _kept_shards(file)
            if [(shard.name, shard.stamps) for shard in shards] == [*current.items()]:
                return shards, LengthCounts(file["lengths"], file["documents"])
            kept = {shard.name: (shard, counts) for shard, counts in zip(shards, _parts(file), strict=True)}
        for (name, stamps), prefix in zip(current.items(), prefixes, strict=True):
            if name not in kept or kept[name][0].stamps != stamps:
                kept[name] = _described(name, stamps, prefix)
        shards = [kept[name][0] for name in current]
        return shards, self._keep(shards, [kept[name][1] for name in current])

    def _keep(self, shards: Sequence[Shard], parts: Sequence[LengthCounts]) -> LengthCounts:
        """Write the manifest of ``shards``, which have the counts ``parts``; the counts of all."""
        total = added_counts(parts)
        manifest = json.dumps({"format": _FORMAT, "shards": [vars(shard) for shard in shards]}).encode()
        keep_arrays(
            self._path,
            shards=np.frombuffer(manifest, np.uint8),
            lengths=total.lengths,
            documents=total.documents,
            ends_of_parts=np.cumsum([len(part.lengths) for part in parts]),
            lengths_of_parts=_narrowed(np.concatenate([part.lengths for part in parts])),
            documents_of_parts=_narrowed(np.concatenate([part.documents for part in parts])),
        )
        return total


def _kept_shards(kept: Any) -> list[Shard]:
    manifest = json.loads(kept["shards"].tobytes())
    return [Shard(**shard) for shard in manifest["shards"]] if manifest["format"] == _FORMAT else []


def _parts(kept: Any) -> list[LengthCounts]:
    """The counts of every shard of a manifest."""
    ends = kept["ends_of_parts"][:-1]
    parts = (np.split(kept[f"{name}_of_parts"].astype(np.int64), ends) for name in ("lengths", "documents"))
    return [LengthCounts(lengths, documents) for lengths, documents in zip(*parts, strict=True)]


def _narrowed(numbers: NDArray[np.int64]) -> NDArray[Any]:
    """In the smallest type that holds all of them."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


def _described(name: str, stamps: list[list[int] | None], prefix: Path) -> tuple[Shard, LengthCounts]:
    """Read all of the index of a shard, which has no documents where a task of the tool that wrote it had none."""
    store = TokenStore.with_index(prefix, read_index(index_path(prefix), sample=False, may_be_empty=True))
    lengths = store.stored_lengths
    assert isinstance(lengths, IndexLengths)
    lengths.index.check_ends()
    counts = lengths.counts  # checks all else, if that was not done when they were kept
    shard = Shard(
        name,
        stamps,
        len(store),
        store.tokens,
        store.dtype.str,
        lengths.one_sequence_each or lengths.index.one_sequence_each(),
        stamps[2] is not None,
        store.vocab_size,
        store.tokenizer,
        store.identity,
    )
    return shard, counts


def _stamps(prefix: Path) -> list[list[int] | None]:
    return [_stamp(f"{prefix}{ending}") for ending in (".idx", ".bin", ".mask", ".json")]


def _stamp(path: str | Path) -> list[int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


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
