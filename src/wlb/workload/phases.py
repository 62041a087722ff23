"""Several costs per document: encoders of images or audio that run before the language model.

The images of a document say little about the length of its text. So a document may have seconds of further phases
beside its tokens for the language model, and packers balance the sum.

Nothing moves between ranks: the encoder runs where the tokens of the document are. OrchMLLM (arXiv 2503.23830) moves
the inputs of encoders instead.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.errors import UserError
from wlb.workload.base import DocumentPrices, Seconds

Table = NDArray[np.int64] | Sequence[Sequence[int]]  # of segments: document, start, length


@dataclass(frozen=True, eq=False)
class DocumentPhases:
    """The costs of every document of a data set before the language model.

    Args:
        seconds: For each phase by name, predicted seconds of each document, forward and backward, on one GPU; shape
            (documents,), in the order of the data set. A document without images costs 0.
        memory_tokens: Memory that these phases hold for a document until its backward, in tokens of the language
            model; shape (documents,). It counts against L_max like tokens. None means none.

    If a document is cut, its first piece has these phases. Raises ``UserError`` for arrays of different lengths, and
    for values that are negative or not finite.
    """

    seconds: Mapping[str, ArrayLike]
    memory_tokens: ArrayLike | None = None

    def __post_init__(self) -> None:
        _ = self._columns

    @cached_property
    def _columns(self) -> tuple[Seconds, NDArray[np.int64]]:
        """Seconds of each document in all phases, and its memory in tokens; shape (documents,) each."""
        columns = [_column(f"seconds of {name!r}", values) for name, values in self.seconds.items()]
        if self.memory_tokens is not None:
            columns.append(_column("memory_tokens", self.memory_tokens))
        sizes = {len(column) for column in columns}
        if len(sizes) > 1:
            raise UserError(f"phases cover {' and '.join(map(str, sorted(sizes)))} documents; give all the same number")
        none = np.zeros(max(sizes, default=1))
        *seconds, memory = columns if self.memory_tokens is not None else [*columns, none]
        return sum(seconds, start=none), np.ceil(memory).astype(np.int64)

    def check(self, documents: int) -> None:
        """Raise ``UserError`` unless the phases are of ``documents`` documents."""
        known = len(self._columns[0])
        if (self.seconds or self.memory_tokens is not None) and known != documents:
            raise UserError(f"phases cover {known} documents, but there are {documents}; give one cost for each")

    def of(self, table: Table) -> Seconds:
        """Seconds of each segment in all phases, shape (segments,). Document ids count over epochs."""
        document, start, _ = _rows(table).T
        seconds, _ = self._columns
        return np.where(start > 0, 0.0, seconds[document % len(seconds)])

    def held_tokens(self, table: Table) -> NDArray[np.int64]:
        """Tokens that each segment counts against L_max, including memory of these phases; shape (segments,)."""
        document, start, length = _rows(table).T
        _, memory = self._columns
        held: NDArray[np.int64] = length + np.where(start > 0, 0, memory[document % len(memory)])
        return held

    @property
    def digest(self) -> str:
        """A digest that processes compare, because their plans depend on these numbers."""
        seconds, memory = self._columns
        content = repr([*self.seconds]).encode() + seconds.astype("<f8").tobytes() + memory.astype("<i8").tobytes()
        return hashlib.blake2b(content, digest_size=8).hexdigest()


@dataclass(frozen=True)
class PhasedPrices:
    """Prices of documents with ``phases`` beside the ``language_model``."""

    language_model: DocumentPrices
    phases: DocumentPhases

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        """Seconds of the language model alone; shape of ``lengths`` (tokens)."""
        return self.language_model.document_seconds(lengths)


def segment_seconds(prices: DocumentPrices, table: Table) -> Seconds:
    """Seconds of each segment over all phases; shape (segments,)."""
    seconds = prices.document_seconds(_rows(table)[:, 2])
    return seconds + prices.phases.of(table) if isinstance(prices, PhasedPrices) else seconds


def _rows(table: Table) -> NDArray[np.int64]:
    rows = table if isinstance(table, np.ndarray) else np.fromiter(chain.from_iterable(table), np.int64)
    return rows.reshape(-1, 3).astype(np.int64, copy=False)


def _column(what: str, values: ArrayLike) -> Seconds:
    column = np.asarray(values, np.float64)
    if column.ndim != 1 or not len(column) or not (np.isfinite(column).all() and (column >= 0).all()):
        raise UserError(f"{what} must be one number of at least 0 for each document, of shape (documents,)")
    return column
