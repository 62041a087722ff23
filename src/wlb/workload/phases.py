"""Several costs per document: what encoders of images or audio take before the language model does.

A document's images and its text are two sizes that say little about each other. So a document may have, beside its
tokens for the language model, seconds of further phases. Packers balance the sum over a document's phases. Where ranks
wait for each other between the phases of a micro-batch (FSDP gathers the weights of every block; an encoder is a
pipeline's first stage), a simulated step takes the sum over phases of the slowest micro-batch.

Nothing is moved between ranks: the encoder runs where the document's tokens are. OrchMLLM (arXiv 2503.23830) moves the
inputs of encoders instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.errors import UserError
from wlb.workload.base import DocumentPrices, Seconds
from wlb.workload.flops import LINEAR_BACKWARD_FACTOR
from wlb.workload.hardware import Hardware

LANGUAGE_MODEL = "language model"

Table = NDArray[np.int64] | Sequence[Sequence[int]]  # of segments: document, start, length


@dataclass(frozen=True, eq=False)
class DocumentPhases:
    """What every document of a data set costs before the language model.

    Args:
        seconds: By the name of the phase, predicted seconds of each document, forward and backward, on one GPU; shape
            (documents,), in the order of the data set. A document without images costs 0.
        memory_tokens: What a document holds in memory for these phases until its backward, in tokens of the language
            model; shape (documents,). It counts against L_max as the document's tokens do. None is nothing.

    A document that is cut has these phases where it begins. Raises ``UserError`` for arrays that differ in length, and
    for what is negative or not finite.
    """

    seconds: Mapping[str, ArrayLike]
    memory_tokens: ArrayLike | None = None

    def __post_init__(self) -> None:
        columns = {name: _column(f"seconds of {name!r}", values) for name, values in self.seconds.items()}
        if LANGUAGE_MODEL in columns:
            raise UserError(f"a phase is called {LANGUAGE_MODEL!r}, whose seconds come from lengths; leave it out")
        held = self.memory_tokens
        memory = None if held is None else np.ceil(_column("memory_tokens", held)).astype(np.int64)
        sizes = {len(column) for column in columns.values()} | (set() if memory is None else {len(memory)})
        if len(sizes) > 1:
            raise UserError(f"phases are of {' and '.join(map(str, sorted(sizes)))} documents; give all of the same")
        object.__setattr__(self, "seconds", columns)
        object.__setattr__(self, "memory_tokens", memory)
        object.__setattr__(self, "_table", np.column_stack([np.zeros((max(sizes, default=1), 0)), *columns.values()]))

    @property
    def names(self) -> list[str]:
        return [*self.seconds]

    def check(self, documents: int) -> None:
        """Raise ``UserError`` unless the phases are those of so many documents."""
        known = len(self._rows)
        if (self.seconds or self.memory_tokens is not None) and known != documents:
            raise UserError(f"phases are of {known} documents, and there are {documents}; give one cost for each")

    def of(self, table: Table) -> Seconds:
        """Seconds of each segment, shape (segments, phases). Ids count over epochs."""
        document, start = np.asarray(table, np.int64).reshape(-1, 3)[:, :2].T
        rows = self._rows
        return np.where(start[:, None] > 0, 0.0, rows[document % len(rows)])

    def held_tokens(self, table: Table) -> NDArray[np.int64]:
        """Tokens that each segment counts against L_max, with those it holds for these phases; shape (segments,)."""
        document, start, length = np.asarray(table, np.int64).reshape(-1, 3).T
        if self.memory_tokens is None:
            return length
        memory: NDArray[np.int64] = np.asarray(self.memory_tokens)
        return length + np.where(start > 0, 0, memory[document % len(memory)])

    def taken(self, table: Table) -> DocumentPhases:
        """Those of segments, as if each were a document."""
        columns = dict(zip(self.names, self.of(table).T, strict=True))
        memory = self.held_tokens(table) - np.asarray(table, np.int64).reshape(-1, 3)[:, 2]
        return DocumentPhases(columns, memory)

    @property
    def digest(self) -> str:
        """What processes compare, as they plan by these numbers."""
        held = b"" if self.memory_tokens is None else np.asarray(self.memory_tokens).astype("<i8").tobytes()
        content = repr(self.names).encode() + self._rows.astype("<f8").tobytes() + held
        return hashlib.blake2b(content, digest_size=8).hexdigest()

    @property
    def _rows(self) -> Seconds:
        rows: Seconds = vars(self)["_table"]
        return rows


@dataclass(frozen=True)
class PhasedPrices:
    """Prices of documents that have ``phases`` beside what ``language_model`` says of their lengths."""

    language_model: DocumentPrices
    phases: DocumentPhases

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        """Those of the language model alone; shape of ``lengths`` (tokens)."""
        return self.language_model.document_seconds(lengths)

    def costs(self, table: Table) -> Seconds:
        """Seconds of each segment in the language model and in every further phase; shape (segments, 1 + phases)."""
        rows = np.asarray(table, np.int64).reshape(-1, 3)
        return np.column_stack([self.document_seconds(rows[:, 2]), self.phases.of(rows)])

    @property
    def names(self) -> list[str]:
        """Of the phases, in the order of ``costs``."""
        return [LANGUAGE_MODEL, *self.phases.names]


def encoder_seconds(tokens: ArrayLike, parameters: float, hardware: Hardware, tp: int = 1) -> Seconds:
    """Forward and backward of ``tokens`` patches or frames in an encoder of so many parameters; shape of ``tokens``.

    Six FLOPs a parameter and token; attention inside an image is left out. A frozen encoder takes a third.
    """
    per_token = 2 * (1 + LINEAR_BACKWARD_FACTOR) * parameters / (hardware.peak_flops * hardware.gemm_efficiency * tp)
    return np.asarray(tokens, np.float64) * per_token


def with_phases(prices: DocumentPrices, phases: DocumentPhases | None) -> DocumentPrices:
    """``prices`` of documents that have ``phases``, if they have any."""
    return prices if phases is None else PhasedPrices(prices, phases)


def segment_seconds(prices: DocumentPrices, table: Table) -> Seconds:
    """Seconds of each segment over all phases; shape (segments,)."""
    if isinstance(prices, PhasedPrices):
        return np.asarray(prices.costs(table).sum(axis=1))
    return prices.document_seconds(np.asarray(table, np.int64).reshape(-1, 3)[:, 2])


def _column(what: str, values: ArrayLike) -> Seconds:
    column = np.asarray(values, np.float64)
    if column.ndim != 1 or not len(column) or not (np.isfinite(column).all() and (column >= 0).all()):
        raise UserError(f"{what} must be one number of at least 0 for each document, of shape (documents,)")
    return column
