"""The index file of a token store: where every document lies in the token file.

The format is Megatron-Core's (``megatron.core.datasets.indexed_dataset``), little-endian throughout::

    9 bytes   "MMIDIDX" and two zero bytes
    uint64    version, 1
    uint8     code of the token type
    uint64    S, number of sequences
    uint64    D, number of documents plus one
    int32[S]  tokens of each sequence
    int64[S]  byte offset of each sequence in the token file
    int64[D]  first sequence of each document, then S

A document is one or more whole sequences. Sequences follow each other without gaps, so a document is one
run of tokens whatever its number of sequences.

The file is mapped into memory and read where a document is asked for, so an index of any size opens at once and all
processes of a machine share what they have read of it. Whatever is read is checked against what the file says of it
elsewhere: a length against byte offsets, documents against sequences. Opening reads a sample in this way,
``check`` everything.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from wlb.documents.store.remote import RemotePath
from wlb.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# Codes of megatron.core.datasets.indexed_dataset.DType; floats hold no token ids.
TOKEN_TYPES = {
    code: np.dtype(name) for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))
}
FLOAT_CODES = {6: "float64", 7: "float32"}
MAX_DOCUMENT_TOKENS = 2**31 - 1
_HEADER = struct.Struct("<9sQBQQ")
_COUNTS = struct.Struct("<QQ")
_CHUNK = 1 << 18  # entries converted or checked at a time: a few MiB of memory
_BLOCK, _SAMPLED_BLOCKS = 1 << 11, 8  # documents that opening checks
_IDENTIFIED_WHOLE, _IDENTIFIED = 1 << 16, 1 << 8  # entries in an identity: all of up to so many, or about so many


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """What an index file says: the token type, and where documents lie.

    The arrays are those of the file: ``sequence_lengths`` and ``pointers`` have the shape (sequences,), ``firsts`` has
    (documents + 1,). All methods raise ``UserError`` where what they read contradicts itself.
    """

    path: Path
    dtype: np.dtype[Any]
    sequence_lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    firsts: NDArray[np.int64]

    @property
    def documents(self) -> int:
        return len(self.firsts) - 1

    @property
    def tokens(self) -> int:
        return self._pointer(len(self.sequence_lengths)) // self.dtype.itemsize

    @property
    def identity(self) -> bytes:
        """What it says of documents: their number and type, all tokens, and where documents begin.

        That is a sum over all lengths before. Of a large index it is taken at a few hundred places: another
        order of documents, or another length, changes it, unless all lengths between two of these places add up alike.
        """
        places = [_spaced(array).astype("<i8").tobytes() for array in (self.pointers, self.firsts)]
        return b"".join([f"{self.dtype.name} {self.documents} {self.tokens} ".encode(), *places])

    def run(self, document: int) -> tuple[int, int]:
        """The first token of a document in the token file, and its tokens."""
        first, last = int(self.firsts[document]), int(self.firsts[document + 1])
        if not 0 <= first <= last <= len(self.sequence_lengths):
            raise self._uncovered()
        start, stop = self._pointer(first), self._pointer(last)
        tokens = int(self.sequence_lengths[first:last].sum(dtype=np.int64))
        follows = start + tokens * self.dtype.itemsize == stop <= self._pointer(len(self.sequence_lengths))
        if start < 0 or start % self.dtype.itemsize or not follows:
            self._check_sequences(first, last)
            raise UserError(f"{self.path} is corrupt: document {document} is at bytes {start} to {stop}")
        return start // self.dtype.itemsize, tokens

    def lengths(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each of ``documents``, in any order; int64 of their shape."""
        first, last = self.firsts[documents], self.firsts[documents + 1]
        sequences = len(self.sequence_lengths)
        if not ((last - first == 1) & (first >= 0) & (last < sequences)).all():
            return np.array([self.run(document)[1] for document in documents.tolist()], np.int64)
        lengths = self.sequence_lengths[first].astype(np.int64)
        ends = self.pointers[first] + lengths * self.dtype.itemsize
        if (lengths < 0).any() or (ends != self.pointers[last]).any():
            for document in documents.tolist():
                self.run(document)  # says what is wrong
        return lengths

    def lengths_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens of the documents from ``start`` to ``stop``; shape (stop - start,)."""
        return np.diff(self.offsets_between(start, stop))

    def offsets_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where in the token file the documents from ``start`` to ``stop`` begin, and the last of them ends."""
        offsets = np.empty(stop - start + 1, np.int64)
        for first in range(start, max(stop, start + 1), _CHUNK):
            last = min(first + _CHUNK, stop)
            offsets[first - start : last - start + 1] = self._offsets(first, last)
        return offsets

    def check(self) -> None:
        """Read all of it."""
        self.check_ends()
        for first in range(0, self.documents, _CHUNK):
            self._offsets(first, min(first + _CHUNK, self.documents))

    def check_sample(self) -> None:
        """Read its ends and a few evenly spaced blocks of documents; all of it where it has no more than that."""
        self.check_ends()
        last = max(0, self.documents - 1) // _BLOCK
        for block in sorted({last * number // (_SAMPLED_BLOCKS - 1) for number in range(_SAMPLED_BLOCKS)}):
            self._offsets(_BLOCK * block, min(_BLOCK * (block + 1), self.documents))

    def _offsets(self, start: int, stop: int) -> NDArray[np.int64]:
        firsts = self.firsts[start : stop + 1]
        low, high = int(firsts[0]), int(firsts[-1])
        if not 0 <= low <= high <= len(self.sequence_lengths) or (np.diff(firsts) < 0).any():
            raise self._uncovered()
        for first in range(low, high, _CHUNK):
            self._check_sequences(first, min(first + _CHUNK, high))
        inside = firsts[: np.searchsorted(firsts, len(self.sequence_lengths))]
        offsets = np.full(len(firsts), self._pointer(len(self.sequence_lengths)))
        offsets[: len(inside)] = self.pointers[inside]
        return offsets // self.dtype.itemsize

    def _check_sequences(self, first: int, last: int) -> None:
        """Raise ``UserError`` unless these sequences follow each other, and the one before them."""
        first = max(0, first - 1)
        lengths = self.sequence_lengths[first:last].astype(np.int64)
        pointers = np.append(self.pointers[first:last], self._pointer(last))
        expected = np.append(pointers[0], pointers[:-1] + lengths * self.dtype.itemsize)
        if first == 0:
            expected[0] = 0
        if lengths.size and lengths.min() < 0:
            bad = int(np.argmax(lengths < 0))
            raise UserError(f"{self.path} is corrupt: sequence {first + bad} has {lengths[bad]} tokens")
        if (pointers != expected).any():
            bad = int(np.argmax(pointers != expected))
            raise UserError(
                f"{self.path} is corrupt: sequence {first + bad} starts at byte {pointers[bad]}, "
                f"the sequences before it end at byte {expected[bad]}"
            )

    def check_ends(self) -> None:
        """Raise ``UserError`` unless documents begin with the first sequence and end with the last."""
        if self.firsts[0] != 0 or self.firsts[-1] != len(self.sequence_lengths):
            raise self._uncovered()

    def _pointer(self, sequence: int) -> int:
        """The byte at which a sequence starts, or after the last one the byte at which that ends."""
        if sequence < len(self.pointers):
            return int(self.pointers[sequence])
        return int(self.pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize if sequence else 0

    def _uncovered(self) -> UserError:
        sequences = len(self.sequence_lengths)
        return UserError(f"{self.path} is corrupt: its documents do not cover its {sequences} sequences in order")


def _spaced(array: NDArray[Any]) -> NDArray[Any]:
    return array[:: 1 if len(array) <= _IDENTIFIED_WHOLE else len(array) // _IDENTIFIED]


def index_path(prefix: Path) -> Path:
    """``PREFIX.idx``."""
    return store_path(prefix, ".idx")


def bin_path(prefix: Path) -> Path:
    """``PREFIX.bin``."""
    return store_path(prefix, ".bin")


def mask_path(prefix: Path) -> Path:
    """``PREFIX.mask``: one byte for each token of ``PREFIX.bin``, 1 where the token is a label and else 0."""
    return store_path(prefix, ".mask")


def sidecar_path(prefix: Path) -> Path:
    """``PREFIX.json``."""
    return store_path(prefix, ".json")


def store_path(prefix: Path, ending: str) -> Path:
    """The file of a store with this ``ending``; the prefix may itself contain dots.

    Raises ``UserError`` for the working directory and the root, to which no ending can be added.
    """
    if not prefix.name:
        raise UserError(f"{prefix} is a directory; name a token store in it, such as {prefix / 'corpus'}")
    return prefix.with_name(prefix.name + ending)


def read_index(path: Path, *, whole: bool = False, sample: bool = True) -> TokenIndex:
    """Open an index file and check a sample of it, unless that has been done before (not ``sample``).

    With ``whole`` it is to be read from its beginning to its end.

    Raises ``UserError`` when the file is missing, foreign, truncated, contradicts itself, or holds floats.
    """
    try:
        with path.open("rb") as file:
            header, size = file.read(_HEADER.size), path.stat().st_size
            dtype, sequences, starts = _parsed_header(path, header, size)
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        remedy = (
            "name one store, not a directory" if isinstance(path, RemotePath) else "make the store with wlb prepare"
        )
        raise UserError(f"token store index {path} does not exist; {remedy}") from None
    except OSError as error:
        raise UserError(f"token store index {path} cannot be read: {error.strerror}") from error
    if not starts:
        raise UserError(f"{path} is corrupt: it does not say where its documents begin")
    if whole and hasattr(content, "madvise"):
        content.madvise(mmap.MADV_SEQUENTIAL)
    lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size)
    pointers = np.frombuffer(content, "<i8", sequences, _HEADER.size + 4 * sequences)
    firsts = np.frombuffer(content, "<i8", starts, _HEADER.size + 12 * sequences)
    index = TokenIndex(path, dtype, lengths, pointers, firsts)
    if sample:
        index.check_sample()
    if not whole and hasattr(content, "madvise"):  # else a document's few bytes come with 128 KiB that nobody needs
        content.madvise(mmap.MADV_RANDOM)
    return index


def _parsed_header(path: Path, header: bytes, size: int) -> tuple[np.dtype[Any], int, int]:
    """The token type, sequences, and documents plus one, of an index file of ``size`` bytes."""
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise UserError(f"{path} is not a Megatron index (no MMIDIDX header of {_HEADER.size} bytes)")
    _, version, code, sequences, starts = _HEADER.unpack(header)
    if version != VERSION:
        raise UserError(f"{path} has index version {version}; only version {VERSION} is known")
    if code in FLOAT_CODES:
        raise UserError(f"{path} holds {FLOAT_CODES[code]} values; token ids must be integers")
    if code not in TOKEN_TYPES:
        raise UserError(f"{path} has token type code {code}; known are {', '.join(map(str, TOKEN_TYPES))}")
    expected = _HEADER.size + 12 * sequences + 8 * starts
    if size != expected:
        raise UserError(
            f"{path} has {size} bytes where its header asks for {expected}: truncated, corrupt or multimodal"
        )
    return TOKEN_TYPES[code], sequences, starts


class IndexWriter:
    """Writes an index whose documents are one sequence each, in memory that does not grow with their number.

    Lengths go to the file as they come; ``finish`` reads them back in chunks to append byte offsets and
    document starts, and last puts the counts into the header. Until then the header asks for an empty index
    of another size, which ``read_index`` refuses.
    """

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]) -> None:
        self.documents = 0
        self._file = file
        self._itemsize = dtype.itemsize
        code = next(code for code, known in TOKEN_TYPES.items() if known == dtype)
        file.write(_HEADER.pack(MAGIC, VERSION, code, 0, 0))

    def add(self, lengths: NDArray[np.int64]) -> None:
        """Append documents of ``lengths`` tokens."""
        self._file.write(lengths.astype("<i4").tobytes())
        self.documents += len(lengths)

    def finish(self) -> None:
        """Complete the file; it stays open."""
        file, end = self._file, 0
        for first in range(0, self.documents, _CHUNK):
            count = min(_CHUNK, self.documents - first)
            file.seek(_HEADER.size + 4 * first)
            lengths = np.frombuffer(file.read(4 * count), "<i4")
            ends = end + np.cumsum(lengths, dtype=np.int64)
            file.seek(_HEADER.size + 4 * self.documents + 8 * first)
            file.write(((ends - lengths) * self._itemsize).astype("<i8").tobytes())
            end = int(ends[-1])
        file.seek(_HEADER.size + 12 * self.documents)
        for first in range(0, self.documents + 1, _CHUNK):
            starts = np.arange(first, min(first + _CHUNK, self.documents + 1), dtype="<i8")
            file.write(starts.tobytes())
        file.seek(_HEADER.size - _COUNTS.size)
        file.write(_COUNTS.pack(self.documents, self.documents + 1))
