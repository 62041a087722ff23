"""Token stores: tokenised documents on disk, read without loading them.

A store is ``PREFIX.idx`` (where documents lie) and ``PREFIX.bin`` (their tokens), in Megatron-Core's format.
``wlb prepare`` adds a sidecar ``PREFIX.json`` that names the tokenizer. If only some tokens are labels, ``PREFIX.mask``
says which. All files are mapped into memory, so a store of any size opens at once.

Several stores, shards or the parts of a mixture, open as one, and document ids count through all of them. Opening reads
a sample of every index. Afterwards a shard is mapped when one of its documents is needed, and only a bounded number at
a time. ``TokenStoreWriter`` makes stores.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store import files
from wlb.documents.store.files import RemoteArray, StoreSource, source_name
from wlb.documents.store.index import MAX_VOCABULARY, TokenIndex, read_index
from wlb.documents.store.writer import SIDECAR_FORMAT, TokenStoreWriter
from wlb.errors import UserError

__all__ = ["TokenStore", "TokenStoreWriter"]

_OPEN_SHARDS = 128  # that stay mapped; each takes up to three file handles, and 1,024 is a usual limit of a process
# Sidecars have a few KiB; a larger PREFIX.json is somebody's data.
_LARGEST_SIDECAR = 1 << 20
_CHUNK = 1 << 16  # documents read at a time
_HASHED = 1 << 24  # values that are hashed together
_SAMPLED_AT, _SAMPLED = (0, 1 / 3, 2 / 3, 1), 1 << 10  # places in a token file, and tokens at each


@dataclass(frozen=True, slots=True)
class Shard:
    """The files of one prefix: the ``tokens`` of all documents, and a ``mask`` of as many bytes, 1 for labels."""

    prefix: str
    index: TokenIndex
    tokens: NDArray[Any] | RemoteArray
    sidecar: dict[str, Any]
    mask: NDArray[np.uint8] | RemoteArray | None = None

    @classmethod
    def open(cls, prefix: str) -> Self:
        index = read_index(f"{prefix}.idx")
        sidecar = _read_sidecar(prefix, index)
        tokens = files.open_array(f"{prefix}.bin", index.dtype, index.tokens)
        if tokens is None:
            raise UserError(
                f"token file {prefix}.bin does not exist, only its index; copy it there, or make the store again"
            )
        mask = files.open_array(f"{prefix}.mask", np.dtype(np.uint8), index.tokens)
        if mask is None and "mask_sha256" in sidecar:
            raise UserError(f"{prefix}.mask does not exist, and the store was written with one; prepare it again")
        return cls(prefix, index, tokens, sidecar, mask)

    @property
    def identity(self) -> str:
        """sha256 in hex over ``TokenIndex.identity``, a sample of tokens and mask, and their sha256 in the sidecar.

        Without a sidecar, changes of tokens outside the sample go unnoticed.
        """
        digest = hashlib.sha256(self.index.identity)
        for what, content in (("content", self.tokens), ("mask", self.mask)):
            if content is not None:
                digest.update(what.encode() + self.sidecar.get(f"{what}_sha256", "").encode())
                last = max(0, self.index.tokens - _SAMPLED)
                for start in (int(last * place) for place in _SAMPLED_AT):
                    digest.update(content[start : start + _SAMPLED].tobytes())
        return digest.hexdigest()

    def has_labels(self) -> bool:
        """Whether any document has a label after its first token; reads up to the first such document."""
        for first in range(0, self.index.documents, _CHUNK):
            starts, tokens = self.index.runs(np.arange(first, min(first + _CHUNK, self.index.documents)))
            runs = np.stack([starts + 1, starts + tokens], axis=1)[tokens > 1].tolist()
            if any(self.mask is None or self.mask[start:end].any() for start, end in runs):
                return True
        return False


class _Known(NamedTuple):
    """What opening a shard found."""

    prefix: str
    documents: int
    tokens: int
    sidecar: dict[str, Any]
    identity: str


class TokenStore:
    """A read-only token store; safe to share between threads and to pickle (a copy re-opens the files)."""

    def __init__(self, stores: Sequence[Sequence[str]]) -> None:
        """Open ``stores``, each given as the prefixes of its shards; see ``open``."""
        self._stores = stores
        self._stamps: dict[str, files.Stamps] = {}
        self._opened = lru_cache(_OPEN_SHARDS)(self._open_shard)
        self._by_store = [[shard for shard in map(self._known, prefixes) if shard.documents] for prefixes in stores]
        for prefixes, shards in zip(stores, self._by_store, strict=True):
            if not shards:
                raise UserError(f"{source_name([f'{prefix}.idx' for prefix in prefixes])} holds no documents")
            _check_alike(shards, "a vocabulary of", [shard.sidecar.get("vocab_size") for shard in shards])
        self._shards = [*chain.from_iterable(self._by_store)]
        _check_alike(self._shards, "the tokenizer", [_tokenizer_identity(shard.sidecar) for shard in self._shards])
        self._ends = np.cumsum([0, *(shard.documents for shard in self._shards)], dtype=np.int64)

    @classmethod
    def open(cls, *sources: StoreSource) -> Self:
        """Open all ``sources`` as one store; each is a prefix, a directory, a glob or a list of shards.

        A prefix may be a URL, such as ``s3://bucket/corpus``. Raises ``UserError`` if a file is missing, truncated,
        corrupt, unreadable, or does not belong to the others; if a store has no documents or is named twice; if its
        shards have different vocabularies; and if any two stores were prepared with different tokenizers.
        """
        stores = [files.store_prefixes(source) for source in sources]
        if not stores:
            raise UserError("no token store is named; give at least one")
        files.refuse_twice([prefix for prefixes in stores for prefix in prefixes])
        return cls(stores)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return TokenStore, (self._stores,)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def firsts(self) -> list[int]:
        """The first document of every store, then the number of all documents."""
        return [0, *accumulate(sum(shard.documents for shard in shards) for shards in self._by_store)]

    @property
    def prefix(self) -> str:
        """How messages name the stores."""
        return " + ".join(map(source_name, self._stores))

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(shard.tokens for shard in self._shards)

    @property
    def is_remote(self) -> bool:
        """Whether any store is on a server, from which single reads are slow."""
        return any(files.is_url(shard.prefix) for shard in self._shards)

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below this; None if a store has no sidecar."""
        sizes = [shard.sidecar.get("vocab_size") for shard in self._shards]
        return None if None in sizes else max(size for size in sizes if size is not None)

    @property
    def sidecar(self) -> dict[str, Any]:
        """The content of the first ``PREFIX.json``; empty without one."""
        return self._shards[0].sidecar

    @property
    def tokenizer(self) -> dict[str, Any] | None:
        """The tokenizer of the first sidecar that names one: kind, name, sha256 of its definition."""
        return next((shard.sidecar["tokenizer"] for shard in self._shards if shard.sidecar.get("tokenizer")), None)

    @property
    def tokenizer_identity(self) -> dict[str, Any] | None:
        """Equal for stores of the same tokenizer."""
        return next(filter(None, (_tokenizer_identity(shard.sidecar) for shard in self._shards)), None)

    @cached_property
    def identity(self) -> str:
        """sha256 in hex over the identities of the shards of each store, in their order; see ``Shard.identity``."""
        identities = [" ".join(shard.identity for shard in shards) for shards in self._by_store]
        return hashlib.sha256("\n".join(identities).encode()).hexdigest()

    @property
    def stored_lengths(self) -> "DocumentLengths":
        """The lengths of the one store, or a list with those of every store, for ``DocumentStream``."""
        of_stores = [
            StoredLengths(self, first, stop - first, sum(shard.tokens for shard in shards))
            for (first, stop), shards in zip(pairwise(self.firsts), self._by_store, strict=True)
        ]
        return of_stores[0] if len(of_stores) == 1 else of_stores

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every document, including its end token; shape (documents,), int64."""
        return np.concatenate([self._opened(shard.prefix).index.lengths() for shard in self._shards])

    def lengths_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of some documents, in any order; int64, shape (documents,).

        Raises ``UserError`` if an index has changed: beyond the end of one cut short, reading kills the process.
        """
        lengths = np.empty(len(documents), np.int64)
        for prefix, first, chosen in self._by_shard(documents):
            files.check_unchanged(prefix, self._stamps[prefix][:1])
            lengths[chosen] = self._opened(prefix).index.runs(documents[chosen] - first)[1]
        return lengths

    def tokens_by_store(self, documents: NDArray[np.int64], tokens: NDArray[np.int64]) -> tuple[int, ...]:
        """Sum ``tokens``, which has one number for each of ``documents`` (ids of any epoch), by store."""
        numbers = np.searchsorted(self.firsts, documents % len(self), side="right") - 1
        return tuple(np.bincount(numbers, tokens, len(self._stores)).astype(np.int64).tolist())

    def check_unchanged(self, documents: NDArray[np.int64]) -> None:
        """Raise ``UserError`` if a file that holds any of ``documents`` has changed since the store was opened.

        Call it after a read to know that the tokens are those of the opened store, and before a read to know that no
        mapped file was cut short, because reading beyond its end kills the process.
        """
        for prefix, _, _ in self._by_shard(documents):
            files.check_unchanged(prefix, self._stamps[prefix])

    def read(self, document: int, start: int = 0, length: int | None = None) -> NDArray[Any]:
        """``length`` tokens of a document from token ``start`` on (default: the rest), as a read-only view.

        Raises ``UserError`` if the range is not inside the document or holds ids outside the vocabulary.
        """
        shard, run = self._place(document, start, length)
        view = shard.tokens[run]
        limit = shard.sidecar.get("vocab_size", MAX_VOCABULARY)
        for token in (view.min(initial=0), view.max(initial=0)):
            if not 0 <= token < limit:
                raise UserError(
                    f"document {document} of {shard.prefix} holds token {token}, outside the vocabulary of {limit}; "
                    "prepare the store again"
                )
        return view

    def loss_mask(self, document: int, start: int, length: int) -> NDArray[np.bool_] | None:
        """Which of ``length`` tokens of a document from token ``start`` on are labels; None if all tokens are.

        Raises ``UserError`` for a byte of the mask that is neither 0 nor 1.
        """
        shard, run = self._place(document, start, length)
        if shard.mask is None:
            return None
        flags = shard.mask[run]
        if flags.size and flags.max() > 1:
            raise UserError(
                f"{shard.prefix}.mask has the byte {flags.max()} in document {document}; "
                "write 1 for labels and 0 for others"
            )
        labels: NDArray[np.bool_] = flags.view(np.bool_)
        return labels

    def check_labels(self) -> None:
        """Raise ``UserError`` unless every store has a label after the first token of a document."""
        for prefixes, shards in zip(self._stores, self._by_store, strict=True):
            if not any(self._opened(shard.prefix).has_labels() for shard in shards):
                raise UserError(
                    f"token store {source_name(prefixes)} has no labels (PREFIX.mask) or only documents of one token, "
                    "so there is nothing to learn; prepare it again"
                )

    def check_content(self) -> None:
        """Read all indexes, and all tokens and masks whose sha256 is known from a sidecar.

        Raises ``UserError`` if anything is damaged.
        """
        for shard in (self._opened(known.prefix) for known in self._shards):
            shard.index.lengths()
            for ending, what, content in ((".bin", "content", shard.tokens), (".mask", "mask", shard.mask)):
                expected = shard.sidecar.get(f"{what}_sha256")
                if content is not None and expected and (found := _sha256(content, shard.index.tokens)) != expected:
                    raise UserError(
                        f"{shard.prefix}{ending} is not what was written: its sha256 is {found}, the sidecar says "
                        f"{expected}; prepare the store again"
                    )

    def _place(self, document: int, start: int, length: int | None) -> tuple[Shard, slice]:
        """The shard that holds ``document``, and the place of these tokens in its files."""
        if not 0 <= document < len(self):
            raise UserError(f"document {document} is not in {self.prefix}, which holds {len(self)} documents")
        number = int(np.searchsorted(self._ends, document, side="right")) - 1
        shard, first = self._opened(self._shards[number].prefix), self._ends[number]
        (begin,), (tokens,) = (found.tolist() for found in shard.index.runs(np.array([document - first])))
        stop = tokens if length is None else start + length
        if not 0 <= start <= stop <= tokens:
            raise UserError(
                f"tokens {start} to {stop} are not in document {document} of {shard.prefix}, which has {tokens}"
            )
        return shard, slice(begin + start, begin + stop)

    def _by_shard(self, documents: NDArray[np.int64]) -> Iterator[tuple[str, int, NDArray[np.bool_]]]:
        """The shards that hold any of ``documents``: prefix, first document, and a mask of those it holds."""
        shards = np.searchsorted(self._ends, documents, side="right") - 1
        return ((self._shards[at].prefix, int(self._ends[at]), shards == at) for at in np.unique(shards).tolist())

    def _open_shard(self, prefix: str) -> Shard:
        """Open a shard that must not have changed since it was first opened."""
        files.check_unchanged(prefix, self._stamps[prefix])
        return Shard.open(prefix)

    def _known(self, prefix: str) -> _Known:
        self._stamps[prefix] = files.stamps_of(prefix)
        shard = self._opened(prefix)
        shard.index.check_sample()
        return _Known(prefix, shard.index.documents, shard.index.tokens, shard.sidecar, shard.identity)


class StoredLengths:
    """The lengths of ``documents`` documents of a store from ``first`` on, read on demand; ``tokens`` is their sum.

    ``lengths[documents]`` takes an int64 array of documents, in any order.
    """

    def __init__(self, store: TokenStore, first: int, documents: int, tokens: int) -> None:
        self._store, self._first, self._documents = store, first, documents
        self.tokens = tokens

    def __len__(self) -> int:
        return self._documents

    def __getitem__(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._store.lengths_of(self._first + documents)


# Tokens per document of one store, shape (documents,): in memory, or read on demand.
Lengths: TypeAlias = NDArray[np.int64] | StoredLengths
# Those of one store, or of every store of a mixture.
DocumentLengths: TypeAlias = Lengths | Sequence[Lengths]


def stored_vocab_size(source: StoreSource) -> int | None:
    """The vocabulary size of the store ``source``; None if there is no store or no sidecar."""
    if not files.names_store(source):
        return None
    prefix = files.store_prefixes(source)[0]  # all shards have the same
    return _read_sidecar(prefix, read_index(f"{prefix}.idx")).get("vocab_size")


def _tokenizer_identity(sidecar: dict[str, Any]) -> dict[str, Any] | None:
    """What distinguishes a sidecar's tokenizer from others: all but the name, which is only a file's."""
    tokenizer = sidecar.get("tokenizer") or {}
    return {key: value for key, value in tokenizer.items() if key != "name"} or None


def _check_alike(shards: Sequence[_Known], what: str, values: Sequence[Any]) -> None:
    """Raise ``UserError`` if the values of two shards differ."""
    known = [(shard.prefix, value) for shard, value in zip(shards, values, strict=True) if value is not None]
    for prefix, value in known:
        if value != known[0][1]:
            raise UserError(
                f"{prefix} has {what} {value}, but {known[0][0]} has {known[0][1]}; prepare all with the same tokenizer"
            )


def _sha256(content: NDArray[Any] | RemoteArray, size: int) -> str:
    digest = hashlib.sha256()
    for start in range(0, size, _HASHED):
        digest.update(content[start : start + _HASHED].data)
    return digest.hexdigest()


def _read_sidecar(prefix: str, index: TokenIndex) -> dict[str, Any]:
    path = f"{prefix}.json"
    try:
        content = files.read_bytes(path)
    except FileNotFoundError:
        return {}
    try:
        sidecar = json.loads(bytes(content)) if len(content) <= _LARGEST_SIDECAR else None
    except (ValueError, RecursionError):
        sidecar = None
    if not isinstance(sidecar, dict) or sidecar.get("format") != SIDECAR_FORMAT:
        raise UserError(
            f"{path} is not what wlb prepare writes beside a token store, an object of format {SIDECAR_FORMAT}; move "
            "it elsewhere, or prepare the store again"
        )
    for key, value in (("documents", index.documents), ("tokens", index.tokens), ("token_type", index.dtype.name)):
        if sidecar.get(key) != value:
            raise UserError(
                f"sidecar {path} says {key} = {sidecar.get(key)!r}, but the index says {value!r}, so they belong to "
                "different stores; prepare the store again"
            )
    return sidecar
