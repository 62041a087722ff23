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
run of tokens whatever its number of sequences, and ``read_index`` reduces the file to one array of token
offsets. Everything in the file is checked against everything else: what opens is consistent.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

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
_CHUNK = 1 << 18  # entries converted at a time when writing: a few MiB of memory


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """What an index file says: the token type and where documents start.

    ``offsets`` has shape (documents + 1,): document d is tokens ``offsets[d]`` to ``offsets[d + 1]``.
    """

    dtype: np.dtype[Any]
    offsets: NDArray[np.int64]

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])


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


def read_index(path: Path) -> TokenIndex:
    """Read and check an index file, in time and memory proportional to its number of documents.

    Raises ``UserError`` when the file is missing, foreign, truncated, contradicts itself, or holds floats or
    no documents.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"token store index {path} does not exist; make the store with wlb prepare") from None
    except OSError as error:
        raise UserError(f"token store index {path} cannot be read: {error.strerror}") from error
    if len(content) < _HEADER.size or not content.startswith(MAGIC):
        raise UserError(f"{path} is not a Megatron index (no MMIDIDX header of {_HEADER.size} bytes)")
    _, version, code, sequences, starts = _HEADER.unpack_from(content)
    if version != VERSION:
        raise UserError(f"{path} has index version {version}; only version {VERSION} is known")
    if code in FLOAT_CODES:
        raise UserError(f"{path} holds {FLOAT_CODES[code]} values; token ids must be integers")
    if code not in TOKEN_TYPES:
        raise UserError(f"{path} has token type code {code}; known are {', '.join(map(str, TOKEN_TYPES))}")
    expected = _HEADER.size + 12 * sequences + 8 * starts
    if len(content) != expected:
        raise UserError(
            f"{path} has {len(content)} bytes where its header asks for {expected}: truncated, corrupt or multimodal"
        )
    if starts < 2:
        raise UserError(f"{path} holds no documents")
    dtype = TOKEN_TYPES[code]
    return TokenIndex(dtype, _document_offsets(path, content, sequences, starts, dtype.itemsize))


def _document_offsets(path: Path, content: bytes, sequences: int, starts: int, itemsize: int) -> NDArray[np.int64]:
    lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size)
    pointers = np.frombuffer(content, "<i8", sequences, _HEADER.size + 4 * sequences)
    firsts = np.frombuffer(content, "<i8", starts, _HEADER.size + 12 * sequences)
    if sequences and lengths.min() < 0:
        bad = int(np.argmax(lengths < 0))
        raise UserError(f"{path} is corrupt: sequence {bad} has {lengths[bad]} tokens")
    offsets = np.zeros(sequences + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if not np.array_equal(pointers, offsets[:-1] * itemsize):
        bad = int(np.argmax(pointers != offsets[:-1] * itemsize))
        raise UserError(
            f"{path} is corrupt: sequence {bad} starts at byte {pointers[bad]}, "
            f"the sequences before it end at byte {offsets[bad] * itemsize}"
        )
    if firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
        raise UserError(f"{path} is corrupt: its documents do not cover its {sequences} sequences in order")
    documents: NDArray[np.int64] = offsets[firsts]
    return documents


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
