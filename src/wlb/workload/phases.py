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

    If a document is cut, its first piece has these phases. Raises ``UserError`` for arrays of different lengths, and
    for values that are negative or not finite.
    """

    seconds: Mapping[str, ArrayLike]

    def __post_init__(self) -> None:
        _ = self._total

    @cached_property
    def _total(self) -> Seconds:
        """Seconds of each document in all phases; shape (documents,)."""
        columns = [_column(f"seconds of {name!r}", values) for name, values in self.seconds.items()]
        sizes = {len(column) for column in columns}
        if len(sizes) > 1:
            raise UserError(f"phases cover {' and '.join(map(str, sorted(sizes)))} documents; give all the same number")
        return sum(columns, start=np.zeros(max(sizes, default=1)))

    def check(self, documents: int) -> None:
        """Raise ``UserError`` unless the phases are of ``documents`` documents."""
        if self.seconds and (known := len(self._total)) != documents:
            raise UserError(f"phases cover {known} documents, but there are {documents}; give one cost for each")

    def of(self, table: Table) -> Seconds:
        """Seconds of each segment in all phases, shape (segments,). Document ids count over epochs."""
        document, start, _ = _rows(table).T
        return np.where(start > 0, 0.0, self._total[document % len(self._total)])

    @property
    def digest(self) -> str:
        """A digest that processes compare, because their plans depend on these numbers."""
        content = repr([*self.seconds]).encode() + self._total.astype("<f8").tobytes()
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
