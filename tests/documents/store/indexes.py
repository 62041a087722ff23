"""Stores without a sidecar, as Megatron-Core and datatrove leave them."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from wlb.documents.store.index import MAGIC

UINT16 = 8


def write_index(prefix: Path, documents: Sequence[Sequence[int]]) -> Path:
    """A store, without a sidecar, of documents that are sequences of these lengths."""
    sequences = np.array([length for document in documents for length in document], np.int64)
    ends = np.cumsum(sequences)
    firsts = np.cumsum([0, *map(len, documents)])
    header = MAGIC + struct.pack("<QBQQ", 1, UINT16, len(sequences), len(firsts))
    arrays = sequences.astype("<i4"), (2 * (ends - sequences)).astype("<i8"), firsts.astype("<i8")
    Path(f"{prefix}.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    np.arange(sequences.sum(), dtype=np.uint16).tofile(prefix.with_suffix(".bin"))
    return prefix
