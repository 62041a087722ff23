"""Token stores: tokenised documents on disk, read without loading them.

A store is ``PREFIX.idx`` (where documents lie) and ``PREFIX.bin`` (their tokens), in Megatron-Core's format, so that
existing Megatron corpora open as they are. ``wlb prepare`` adds a sidecar ``PREFIX.json`` that names the tokenizer, and
where only some tokens are labels, ``PREFIX.mask`` says which. ``TokenStore`` maps all of them into memory,
so a store of any size opens at once: any slice of any document is an array view, O(1). ``TokenStoreWriter`` makes
stores.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store.index import (
    TokenIndex,
    bin_path,
    index_path,
    mask_path,
    read_index,
    sidecar_path,
)
from wlb.documents.store.lengths import chunks
from wlb.documents.store.remote import RemoteArray, RemotePath, store_prefix
from wlb.documents.store.sources import StoreSource, store_prefixes
from wlb.documents.store.stamps import Stamps, check_unchanged, stamps_of
from wlb.documents.store.writer import SIDECAR_FORMAT, TokenStoreWriter
from wlb.errors import UserError

__all__ = ["TokenStore", "TokenStoreWriter"]

# Sidecars have a few KiB; a larger PREFIX.json is somebody's data.
_LARGEST_SIDECAR = 1 << 20
_MASK_CHUNK = 1 << 20  # tokens whose mask is looked at together


class TokenStore:
    """A read-only token store; safe to share between threads and to pickle (a copy re-opens the files)."""

    def __init__(
        self,
        prefix: Path,
        index: TokenIndex,
        data: NDArray[Any] | RemoteArray,
        sidecar: dict[str, Any],
        mask: NDArray[np.uint8] | RemoteArray | None = None,
        stamps: Stamps = (None, None, None),
    ) -> None:
        self.prefix = prefix
        self.sidecar = sidecar
        self._index = index
        self.stamps = stamps
        self._data = data
        self._mask = mask
        self._vocab_size: int | None = sidecar.get("vocab_size")

    @classmethod
    def open(cls, prefix: str | Path, *, may_be_empty: bool = False) -> TokenStore:
        """Open ``PREFIX.idx``, ``PREFIX.bin`` and, if they are there, ``PREFIX.json`` and ``PREFIX.mask``.

        ``prefix`` may be a URL, such as ``s3://bucket/corpus``. Raises ``UserError`` when a file is missing, truncated,
        corrupt or does not belong to the others, or cannot be read, and unless it ``may_be_empty`` for a store without
        documents. Stores in many shards are opened by ``wlb.documents.store.group.StoreGroup.open``.
        """
        prefix = store_prefix(prefix)
        stamps = stamps_of(prefix)
        store = TokenStore.with_index(prefix, read_index(index_path(prefix)), stamps)
        if not (len(store) or may_be_empty):
            raise UserError(f"{index_path(prefix)} holds no documents")
        return store

    @classmethod
    def with_index(cls, prefix: Path, index: TokenIndex, stamps: Stamps) -> TokenStore:
        """Open the files of ``PREFIX`` beside its ``index``, of which all had ``stamps`` before that was opened."""
        sidecar = _read_sidecar(prefix, index)
        tokens, mask = _map_tokens(bin_path(prefix), index), _map_mask(prefix, index, sidecar)
        return cls(prefix, index, tokens, sidecar, mask, stamps)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return TokenStore.open, (self.prefix,)

    def __len__(self) -> int:
        return self._index.documents

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every document, its end token included; shape (documents,), 8 bytes for each in memory."""
        return self.lengths_between(0, len(self))

    def lengths_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens of the documents from ``start`` to ``stop``."""
        return self._index.lengths_between(start, stop)

    def lengths_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of some documents, in any order; int64 of their shape."""
        return self._index.lengths(documents)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return self._index.tokens

    @property
    def dtype(self) -> np.dtype[Any]:
        """Integer type of the stored tokens."""
        return self._index.dtype

    @property
    def is_remote(self) -> bool:
        """Whether tokens come from a server, where one read at a time would be slow."""
        return isinstance(self.prefix, RemotePath)

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below this; None without a sidecar."""
        return self._vocab_size

    @property
    def tokenizer(self) -> dict[str, Any] | None:
        """Identity of the tokenizer from the sidecar: kind, name, sha256 of its definition."""
        return self.sidecar.get("tokenizer")

    @cached_property
    def identity(self) -> str:
        """sha256 in hex over ``TokenIndex.identity`` and, where the sidecar has it, its sha256 of the tokens.

        The tokens are not read: the writer of the store hashed them, and their mask, if there is one. A store without
        that, such as one made by Megatron-Core, keeps its identity when tokens change and lengths do not.
        """
        digest = hashlib.sha256(self._index.identity)
        digest.update(self.sidecar.get("content_sha256", "").encode())
        if self._mask is not None:
            digest.update(b"mask" + self.sidecar.get("mask_sha256", "").encode())
        return digest.hexdigest()

    def check_unchanged(self, documents: NDArray[np.int64]) -> None:
        """Raise ``UserError`` where a file that holds any of ``documents`` has changed since the store was opened.

        Called after a read, it says that what was read is of the store that was opened; called before, that no part of
        a mapped file is missing, of which a read would kill the process. Remote files are compared by their reader.
        """
        check_unchanged(self.prefix, self.stamps)

    def read(self, document: int, start: int = 0, length: int | None = None) -> NDArray[Any]:
        """``length`` tokens of a document from token ``start`` on (default: the rest), as a read-only view.

        Raises ``UserError`` when the range is not inside the document or holds ids outside the vocabulary.
        """
        if not 0 <= document < len(self):
            raise UserError(f"document {document} is not in {self.prefix}, which holds {len(self)} documents")
        first, tokens = self._index.run(document)
        length = tokens - start if length is None else length
        if start < 0 or length < 0 or start + length > tokens:
            raise UserError(
                f"tokens {start} to {start + length} are not in document {document} of {self.prefix}, "
                f"which has {tokens}"
            )
        view = self._data[first + start : first + start + length]
        self._check_ids(view, document)
        return view

    def loss_mask(self, document: int, start: int, length: int) -> NDArray[np.bool_] | None:
        """Which of ``length`` tokens of a document from token ``start`` on are labels; None where all tokens are.

        Raises ``UserError`` for a byte of the mask that is neither 0 nor 1.
        """
        if self._mask is None:
            return None
        first = self._index.run(document)[0] + start
        flags = self._mask[first : first + length]
        if flags.size and flags.max() > 1:
            raise UserError(
                f"{mask_path(self.prefix)} has the byte {flags.max()} for a token of document {document}; write 1 for "
                "tokens that are labels and 0 for others"
            )
        labels: NDArray[np.bool_] = flags.view(np.bool_)
        return labels

    def has_labels(self) -> bool:
        """Whether some document has a token that follows another and is a label.

        Reads the mask, if there is one, up to the first such token.
        """
        if self._mask is None:
            return any((lengths > 1).any() for _, lengths in chunks(self.lengths_between, len(self)))
        return any(map(self._labels_from, range(0, self.tokens, _MASK_CHUNK)))

    def _labels_from(self, start: int) -> bool:
        """Whether ``_MASK_CHUNK`` tokens from ``start`` on have a label that is not the first token of its document."""
        assert self._mask is not None
        labels = self._mask[start : start + _MASK_CHUNK] != 0
        first, last = (
            bisect_left(range(len(self)), token, key=lambda document: self._index.run(document)[0])
            for token in (start, start + len(labels))
        )
        labels[self._index.offsets_between(first, last)[:-1] - start] = False
        return bool(labels.any())

    def _check_ids(self, view: NDArray[Any], document: int) -> None:
        if not view.size:
            return
        largest, limit = int(view.max()), self._vocab_size
        if limit is not None and largest >= limit:
            raise UserError(
                f"document {document} of {self.prefix} holds token {largest}, outside the vocabulary of {limit}"
            )
        if view.dtype.kind == "i" and view.min() < 0:
            raise UserError(f"document {document} of {self.prefix} holds the negative token {view.min()}")


def _map_tokens(path: Path, index: TokenIndex) -> NDArray[Any] | RemoteArray:
    try:
        return _mapped(path, index.dtype, index)
    except FileNotFoundError:
        raise UserError(f"token file {path} does not exist, only its index") from None


def _map_mask(prefix: Path, index: TokenIndex, sidecar: dict[str, Any]) -> NDArray[np.uint8] | RemoteArray | None:
    path = mask_path(prefix)
    try:
        return _mapped(path, np.dtype(np.uint8), index)
    except FileNotFoundError:
        if "mask_sha256" in sidecar:
            raise UserError(f"{path} does not exist, and the store was written with one; prepare it again") from None
        return None


def _mapped(path: Path, dtype: np.dtype[Any], index: TokenIndex) -> NDArray[Any] | RemoteArray:
    """A file of one value for each token of the store. Raises ``UserError`` where it has more or fewer."""
    expected = index.tokens * dtype.itemsize
    try:
        size = path.stat().st_size
        if size == expected and isinstance(path, RemotePath):
            return RemoteArray(path, dtype)
        if size == expected:  # an empty file cannot be mapped
            return np.memmap(str(path), dtype, mode="r") if size else np.empty(0, dtype)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    raise UserError(f"{path} has {size} bytes where its index asks for {expected}: truncated or of another store")


def check_store(prefix: Path) -> TokenStore:
    """Open a store and read all of it: its index, and where the sidecar says what tokens and mask are, these too.

    Raises ``UserError`` for whatever is damaged.
    """
    store = TokenStore.open(prefix)
    prefix = store.prefix
    read_index(index_path(prefix), whole=True).check()
    for path, key in ((bin_path(prefix), "content_sha256"), (mask_path(prefix), "mask_sha256")):
        if (expected := store.sidecar.get(key)) is not None and (found := _sha256(path)) != expected:
            raise UserError(
                f"{path} is not what was written: its sha256 is {found}, the sidecar says {key} = {expected}; "
                "prepare the store again"
            )
    return store


def _sha256(path: Path) -> str:
    """In hex, of the content of a file, which is not held in memory."""
    digest = hashlib.sha256()
    try:
        if isinstance(path, RemotePath):
            for piece in path.pieces():
                digest.update(piece)
            return digest.hexdigest()
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def stored_vocab_size(source: StoreSource) -> int | None:
    """The vocabulary of the store that ``source`` names; None where there is no store, or it does not say."""
    for prefix in store_prefixes(source):
        if index_path(prefix).exists():
            index = read_index(index_path(prefix))
            return _read_sidecar(prefix, index).get("vocab_size")  # all shards have the same
    return None


def _read_sidecar(prefix: Path, index: TokenIndex) -> dict[str, Any]:
    path = sidecar_path(prefix)
    try:
        is_long = path.stat().st_size > _LARGEST_SIDECAR
        sidecar = None if is_long else json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"sidecar {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise UserError(f"sidecar {path} is not valid JSON; prepare the store again or remove it") from None
    if not isinstance(sidecar, dict) or "format" not in sidecar:
        raise UserError(
            f"{path} is not what wlb prepare writes beside a token store, an object with a format; move it elsewhere, "
            "or prepare the store again"
        )
    _check_sidecar(path, sidecar, index)
    return sidecar


def _check_sidecar(path: Path, sidecar: dict[str, Any], index: TokenIndex) -> None:
    if sidecar["format"] != SIDECAR_FORMAT:
        raise UserError(f"sidecar {path} has format {sidecar['format']!r}; this version reads {SIDECAR_FORMAT!r}")
    actual = {"documents": index.documents, "tokens": index.tokens, "token_type": index.dtype.name}
    for key, value in actual.items():
        if sidecar.get(key) != value:
            raise UserError(
                f"sidecar {path} says {key} = {sidecar.get(key)!r}, the index {value!r}: it is of another store"
            )
    vocab_size = sidecar.get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise UserError(f"sidecar {path} has vocab_size {vocab_size!r}; it must be a positive whole number")
    if not isinstance(sidecar.get("content_sha256", ""), str):
        raise UserError(f"sidecar {path} is corrupt: its content_sha256 is not a string")
    if not isinstance(sidecar.get("tokenizer"), dict | None):
        raise UserError(f"sidecar {path} is corrupt: its tokenizer is not an object")
