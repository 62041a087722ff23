"""Which document comes next: the order of documents over epochs, as a few integers of state.

Every epoch visits every document once, in an order that follows from ``[seed, epoch]`` alone, so a position
in the order is (epoch, cursor) and any rank can go there directly. Document ids count up over the
whole history, ``epoch * documents in the store + index in the store``; an id is never used twice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wlb.documents.overlong import OverlongReport, split_overlong
from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.settings import NonEmptyPath, NonNegativeInt, Section, Tokens


class DataConfig(Section):
    """Which documents, and what happens to those longer than the context window."""

    store: NonEmptyPath = Field(description="Prefix of the token store (PREFIX.bin and PREFIX.idx)")
    context_window: Tokens = Field(4096, description="Longest run of tokens attention may span")
    overlong: Literal["split", "truncate", "drop", "error"] = Field(
        "split", description="What happens to documents longer than the context window"
    )
    seed: NonNegativeInt = Field(0, description="Seed of the document order")
    shuffle: bool = Field(True, description="Shuffle documents anew in every epoch")


@dataclass(frozen=True)
class EpochSummary:
    """What one epoch does with the documents of a store, known from their lengths before it starts."""

    documents: int
    empty: int
    overlong: int


class DocumentStream:
    """An endless stream of documents, taken a few at a time and never across the end of an epoch.

    ``lengths`` are tokens per document of the store. Empty documents are passed over; those longer than the
    context window meet ``data.overlong``. It begins with ``epoch``. Raises ``UserError`` if that leaves nothing to
    train on.
    """

    def __init__(self, lengths: NDArray[np.int64], config: DataConfig, *, epoch: int = 0) -> None:
        self._lengths = lengths
        self._config = config
        self.summary = summarise_epoch(lengths, config)
        self._epoch = epoch
        self._cursor = 0
        self._overlong = OverlongReport()  # of all documents taken, over all epochs
        self._seed, self._shuffle = config.seed, config.shuffle  # of this epoch
        self._order: NDArray[np.int64] | None = None  # of this epoch, once it is asked for

    @property
    def epoch(self) -> int:
        """That the next documents are of, or the last ones were where it is over."""
        return self._epoch

    @property
    def epoch_is_over(self) -> bool:
        return self._cursor == len(self._lengths)

    def take(self, documents: int) -> list[Segment]:
        """The segments of the next ``documents`` documents of this epoch, or of as many as remain."""
        if self._order is None:
            count = len(self._lengths)
            self._order = shuffled(count, self._seed, self._epoch) if self._shuffle else np.arange(count)
        chosen = self._order[self._cursor : self._cursor + documents]
        self._cursor += len(chosen)
        lengths = self._lengths[chosen]
        ids = chosen[lengths > 0] + self._epoch * len(self._lengths)
        segments = [
            Segment(document, 0, length)
            for document, length in zip(ids.tolist(), lengths[lengths > 0].tolist(), strict=True)
        ]
        segments, report = split_overlong(segments, self._config.context_window, self._config.overlong)
        self._overlong += report
        return segments

    def next_epoch(self) -> None:
        self._begin(self._epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "documents": len(self._lengths),
            "epoch": self._epoch,
            "cursor": self._cursor,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "overlong": asdict(self._overlong),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an epoch of the same documents, in the order that it began with."""
        self._epoch, self._cursor, self._order = state["epoch"], state["cursor"], None
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self._overlong = OverlongReport(**state["overlong"])

    def begin_after(self, state: dict[str, Any]) -> None:
        """Begin the first epoch of these documents with ids above all that the documents of ``state`` can have had."""
        used = (state["epoch"] + 1) * state["documents"]
        self._begin(-(-used // len(self._lengths)))
        self._overlong = OverlongReport(**state["overlong"])

    def _begin(self, epoch: int) -> None:
        self._epoch, self._cursor, self._order = epoch, 0, None
        self._seed, self._shuffle = self._config.seed, self._config.shuffle


def summarise_epoch(lengths: NDArray[np.int64], config: DataConfig) -> EpochSummary:
    """What an epoch does with documents of ``lengths``. Raises ``UserError`` if it leaves nothing to train on."""
    summary = EpochSummary(
        documents=len(lengths),
        empty=int(np.count_nonzero(lengths == 0)),
        overlong=int(np.count_nonzero(lengths > config.context_window)),
    )
    if summary.overlong and config.overlong == "error":
        document = int(np.argmax(lengths > config.context_window))
        raise UserError(
            f"document {document} has {lengths[document]} tokens, over data.context_window = "
            f"{config.context_window} ({summary.overlong} documents are); raise it or set data.overlong = 'split'"
        )
    dropped = summary.overlong if config.overlong == "drop" else 0
    if summary.documents - summary.empty - dropped <= 0:
        raise UserError(
            f"nothing to train on in token store {config.store}: of {summary.documents} documents {summary.empty} "
            f"are empty and {dropped} dropped as longer than data.context_window = {config.context_window}"
        )
    return summary


def shuffled(documents: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of ``documents`` documents in ``epoch``: the same on every version of NumPy.

    NumPy promises the stream of its bit generators but not what ``permutation`` makes of it, and a job may be
    continued on another version; so each document draws a number, and they are sorted by it.
    """
    drawn = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(documents)
    return np.argsort(drawn, kind="stable")
