"""The index file of a token store, which says where every document lies in the token file.

The format is Megatron-Core's (``megatron.core.datasets.indexed_dataset``), little-endian throughout::

    9 bytes   "MMIDIDX" and two zero bytes
    uint64    version, 1
    uint8     code of the token type
    uint64    S, number of sequences
    uint64    D, number of documents plus one
    int32[S]  tokens of each sequence
    int64[S]  byte offset of each sequence in the token file
    int64[D]  first sequence of each document, then S

A document is one or more whole sequences. Sequences follow each other without gaps, so a document is one run of tokens.

The file is mapped into memory and read only where a document is needed. Every read checks the document: its byte
offsets must agree with the lengths of its sequences. Opening a store checks a sample this way, ``lengths`` checks all.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store.files import is_url, read_bytes
from wlb.errors import UserError
from wlb.files import flush

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# Codes of megatron.core.datasets.indexed_dataset.DType. Its others, 6 and 7, are floats, which are no token ids.
TOKEN_TYPES = {
    code: np.dtype(name) for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))
}
MAX_VOCABULARY = 2**31
_HEADER = struct.Struct("<9sQBQQ")
_CHUNK = 1 << 18  # documents checked at a time, in a few MiB of memory
_BLOCK, _SAMPLED_BLOCKS = 1 << 11, 8  # documents that opening a store checks
_IDENTIFIED_WHOLE, _IDENTIFIED = 1 << 16, 1 << 8  # entries in an identity: all, up to 65,536, else about 256


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """The content of an index file: the token type, and where documents lie.

    The arrays are those of the file: ``sequence_lengths`` and ``pointers`` have shape (sequences,), ``firsts`` has
    shape (documents + 1,). All methods raise ``UserError`` if what they read contradicts itself.
    """

    path: str
    dtype: np.dtype[Any]
    sequence_lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    firsts: NDArray[np.int64]

    @property
    def documents(self) -> int:
        return len(self.firsts) - 1

    @property
    def tokens(self) -> int:
        return int(self._begins(np.array([len(self.pointers)]))[0]) // self.dtype.itemsize

    @property
    def identity(self) -> bytes:
        """Number and type of documents, number of tokens, and where documents begin.

        A large index is sampled at a few hundred places. Another order of documents, or another length, changes the
        identity unless the lengths between each two of these places have the same sum.
        """
        places = [_spaced(array).astype("<i8").tobytes() for array in (self.pointers, self.firsts)]
        return b"".join([f"{self.dtype.name} {self.documents} {self.tokens} ".encode(), *places])

    def runs(self, documents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first token of each document in the token file, and its number of tokens; int64, shape (documents,)."""
        first, last = self.firsts[documents], self.firsts[documents + 1]
        if not ((first >= 0) & (first <= last) & (last <= len(self.pointers))).all():
            raise self._uncovered()
        starts, stops = self._begins(first), self._begins(last)
        tokens, only = np.zeros(len(first), np.int64), last - first == 1
        tokens[only] = self.sequence_lengths[first[only]]
        for place in np.flatnonzero(last - first > 1):
            tokens[place] = self.sequence_lengths[first[place] : last[place]].sum(dtype=np.int64)
        size = self.dtype.itemsize
        bad = np.flatnonzero((tokens < 0) | (starts < 0) | (starts % size != 0) | (starts + tokens * size != stops))
        if bad.size:
            at = bad[0]
            raise UserError(
                f"{self.path} is corrupt: document {documents[at]} has {tokens[at]} tokens of {size} bytes each, and "
                f"lies at bytes {starts[at]} to {stops[at]}; make the store again"
            )
        return starts // size, tokens

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of all documents, shape (documents,); reads and checks the whole index."""
        self._check_ends()
        chunks = (np.arange(first, min(first + _CHUNK, self.documents)) for first in range(0, self.documents, _CHUNK))
        return np.concatenate([np.empty(0, np.int64), *(self.runs(chunk)[1] for chunk in chunks)])

    def check_sample(self) -> None:
        """Read and check both ends and a few evenly spaced blocks of documents."""
        self._check_ends()
        last = max(0, self.documents - 1) // _BLOCK
        for block in sorted({last * number // (_SAMPLED_BLOCKS - 1) for number in range(_SAMPLED_BLOCKS)}):
            self.runs(np.arange(_BLOCK * block, min(_BLOCK * (block + 1), self.documents)))

    def _check_ends(self) -> None:
        """Raise ``UserError`` unless documents begin with the first sequence and byte, and end with the last."""
        if self.firsts[0] != 0 or self.firsts[-1] != len(self.pointers) or (len(self.pointers) and self.pointers[0]):
            raise self._uncovered()

    def _begins(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """The byte at which each of ``sequences`` starts; one past the last sequence, the end of the file."""
        count = len(self.pointers)
        if not count:
            return np.zeros(len(sequences), np.int64)
        begins = self.pointers[np.minimum(sequences, count - 1)].astype(np.int64)
        end = int(self.sequence_lengths[count - 1]) * self.dtype.itemsize
        return begins + np.where(sequences == count, end, 0)

    def _uncovered(self) -> UserError:
        what = f"its documents do not cover its {len(self.pointers)} sequences in order"
        return UserError(f"{self.path} is corrupt: {what}; make it again")


def _spaced(array: NDArray[Any]) -> NDArray[Any]:
    return array[:: 1 if len(array) <= _IDENTIFIED_WHOLE else len(array) // _IDENTIFIED]


def read_index(path: str | Path) -> TokenIndex:
    """Open an index file. Raises ``UserError`` if it is missing, foreign, truncated or holds floats."""
    try:
        content = read_bytes(str(path))
    except FileNotFoundError:
        remedy = "name one store, not a directory" if is_url(path) else "make the store with wlb prepare"
        raise UserError(f"token store index {path} does not exist; {remedy}") from None
    header, size = content[: _HEADER.size], len(content)
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise UserError(
            f"{path} is not the index of a token store (no MMIDIDX header of {_HEADER.size} bytes); make one with "
            "wlb prepare"
        )
    _, version, code, sequences, starts = _HEADER.unpack(header)
    if version != VERSION:
        raise UserError(f"{path} has index version {version}; make the store again in version {VERSION}")
    if code not in TOKEN_TYPES:
        raise UserError(
            f"{path} has values of type code {code}; make the store again with token ids, whose codes are "
            f"{', '.join(map(str, TOKEN_TYPES))}"
        )
    expected = _HEADER.size + 12 * sequences + 8 * starts
    if size != expected or not starts:
        raise UserError(
            f"{path} has {size} bytes, but its header asks for {expected}, so it is truncated, corrupt or multimodal; "
            "make the store again"
        )
    if hasattr(content, "madvise"):  # else reading a document's few bytes loads 128 KiB
        content.madvise(mmap.MADV_RANDOM)
    lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size)
    pointers = np.frombuffer(content, "<i8", sequences, _HEADER.size + 4 * sequences)
    firsts = np.frombuffer(content, "<i8", starts, _HEADER.size + 12 * sequences)
    return TokenIndex(str(path), TOKEN_TYPES[code], lengths, pointers, firsts)


def write_index(path: Path, dtype: np.dtype[Any], lengths: NDArray[np.int32]) -> None:
    """Write the index of documents that are one sequence of ``lengths`` tokens each, and wait until it is on disk."""
    code = next(code for code, known in TOKEN_TYPES.items() if known == dtype)
    with path.open("wb") as file:
        file.write(_HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
        lengths.astype("<i4", copy=False).tofile(file)
        pointers = np.cumsum(lengths, dtype="<i8")
        pointers -= lengths
        pointers *= dtype.itemsize
        pointers.tofile(file)
        del pointers  # only one such array at a time
        np.arange(len(lengths) + 1, dtype="<i8").tofile(file)
        flush(file)
