"""The lengths of a store's documents, read from its index where they are asked for, and how many there are of each.

Counting them takes a pass over the index. What it finds about a large store is kept beside it, as ``PREFIX.lengths``,
with the identity of the index that it is of; ``wlb prepare`` makes that file at once. Where the directory cannot be
written, every process makes the pass. As the pass also checks the whole index, damage that opening did not find is
found here.

A large index whose documents are one sequence each is planned by its sequence lengths alone, 4 bytes in one place for
each document instead of 28 in three. That they agree with the rest is checked again when its tokens are read.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.length_counts import LengthCounts, counted
from wlb.documents.store.index import TokenIndex, counts_path, index_path, read_index
from wlb.documents.store.remote import RemotePath

_KEPT_FROM = 1 << 22  # documents; fewer are counted in less than a tenth of a second
_HASHED_WHOLE = 1 << 26  # bytes of an index, some three million documents; larger ones are known by a sample


class IndexLengths:
    """``StoredLengths`` of an index; ``kept_at`` is where the counts of a large one are kept."""

    def __init__(self, index: TokenIndex, kept_at: Path | None = None) -> None:
        self.index = index
        self._kept_at = kept_at
        self.one_sequence_each = False  # or not known

    def __len__(self) -> int:
        return self.index.documents

    def __getitem__(self, documents: NDArray[np.int64] | slice) -> NDArray[np.int64]:
        if isinstance(documents, slice):
            start, stop, _ = documents.indices(len(self))
            return self.index.lengths_between(start, stop)
        if self.one_sequence_each:
            lengths = self.index.sequence_lengths[documents].astype(np.int64)
            if not lengths.size or lengths.min() >= 0:
                return lengths
        return self.index.lengths(documents)

    @cached_property
    def counts(self) -> LengthCounts:
        """Raises ``UserError`` where the index is damaged and has to be read for them."""
        if self._kept_at is None or len(self) < _KEPT_FROM:
            return counted([self])
        if (kept := self._kept()) is not None:
            return kept
        whole = read_index(self.index.path, whole=True)
        found = counted([IndexLengths(whole)])
        self.one_sequence_each = whole.one_sequence_each()
        self._keep(found)
        return found

    def _kept(self) -> LengthCounts | None:
        """What an earlier pass found, None where there was none or it was over another index."""
        assert self._kept_at is not None
        with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(self._kept_at) as kept:
            counts = LengthCounts(kept["lengths"], kept["documents"])
            of_this = str(kept["index"]) == index_digest(self.index).hexdigest()
            if of_this and (counts.total_documents, counts.tokens) == (len(self), self.index.tokens):
                self.one_sequence_each = bool(kept["one_sequence_each"])
                return counts
        return None

    def _keep(self, counts: LengthCounts) -> None:
        assert self._kept_at is not None
        keep_arrays(
            self._kept_at,
            index=np.array(index_digest(self.index).hexdigest()),
            one_sequence_each=np.array(self.one_sequence_each),
            lengths=counts.lengths,
            documents=counts.documents,
        )


def keep_arrays(path: Path, **arrays: Any) -> None:
    """Write ``arrays`` to ``path`` for ``np.load``, unless that cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with suppress(OSError):
        try:
            with part.open("wb") as file:
                np.savez(file, **arrays)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def kept_lengths(prefix: Path, index: TokenIndex) -> IndexLengths:
    """The lengths of a store; counts are kept beside it, or beside the copy of the index of a remote one."""
    kept_at = counts_path(prefix)
    if isinstance(kept_at, RemotePath) and isinstance(index.path, RemotePath):
        kept_at = kept_at.local() if kept_at.exists() else index.path.local().with_suffix(".lengths")
    return IndexLengths(index, kept_at)


def keep_counts(prefix: Path) -> None:
    """Count the lengths of a store, and keep what is found where it is large."""
    index = read_index(index_path(prefix))
    if index.documents >= _KEPT_FROM:
        _ = kept_lengths(prefix, index).counts


def index_digest(index: TokenIndex, *, whole: bool = False) -> Any:
    """sha256 over the index file; of a large one over its sizes and what opening checks of it, unless ``whole``.

    Byte offsets sum up all lengths before them. So two indexes that differ in some lengths are told apart by a sample
    where it has an offset after the first difference and before other documents make up for it.
    """
    if whole or is_hashed_whole(index):
        with index.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256")
    digest = hashlib.sha256(f"{index.dtype.str} {index.documents} {len(index.pointers)}".encode())
    for offsets in index.sampled_offsets():
        digest.update(offsets.tobytes())
    return digest


def is_hashed_whole(index: TokenIndex) -> bool:
    """Whether the index is small enough to be read for its identity."""
    return index.path.stat().st_size <= _HASHED_WHOLE
