"""Which document comes next: the order of documents over epochs, as a few integers of state.

Every epoch visits every document once, in a permutation that follows from ``[seed, epoch]`` alone, so a position
in the order is (epoch, cursor) and any rank can go there directly. Document ids count up over the
whole history, ``epoch * documents in the store + index in the store``; an id is never used twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.config import DataConfig
from wlb.documents.overlong import split_overlong
from wlb.documents.segments import Segment
from wlb.errors import UserError


@dataclass(frozen=True)
class EpochSummary:
    """What one epoch does with the documents of a store, known from their lengths before it starts."""

    documents: int
    empty: int
    overlong: int


class DocumentStream:
    """An endless stream of documents, taken a few at a time and never across the end of an epoch.

    ``lengths`` are tokens per document of the store. Empty documents are passed over; those longer than the
    context window meet ``data.overlong``. Raises ``UserError`` if that leaves nothing to train on.
    """

    def __init__(self, lengths: NDArray[np.int64], config: DataConfig) -> None:
        self._lengths = lengths
        self._config = config
        self.summary = EpochSummary(
            documents=len(lengths),
            empty=int(np.count_nonzero(lengths == 0)),
            overlong=int(np.count_nonzero(lengths > config.context_window)),
        )
        self._check_something_remains()
        self._cursor = 0
        self._start_epoch(0)

    @property
    def epoch_is_over(self) -> bool:
        return self._cursor == len(self._lengths)

    def take(self, documents: int) -> list[Segment]:
        """The segments of the next ``documents`` documents of this epoch, or of as many as remain."""
        chosen = self._order[self._cursor : self._cursor + documents]
        self._cursor += len(chosen)
        lengths = self._lengths[chosen]
        ids = chosen[lengths > 0] + self._epoch * len(self._lengths)
        segments = [
            Segment(document, 0, length)
            for document, length in zip(ids.tolist(), lengths[lengths > 0].tolist(), strict=True)
        ]
        segments, _ = split_overlong(segments, self._config.context_window, self._config.overlong)
        return segments

    def next_epoch(self) -> None:
        self._start_epoch(self._epoch + 1)
        self._cursor = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "cursor": self._cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start_epoch(state["epoch"])
        self._cursor = state["cursor"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        count = len(self._lengths)
        if self._config.shuffle:
            self._order = np.random.default_rng([self._config.seed, epoch]).permutation(count)
        else:
            self._order = np.arange(count)

    def _check_something_remains(self) -> None:
        summary, config = self.summary, self._config
        if summary.overlong and config.overlong == "error":
            document = int(np.argmax(self._lengths > config.context_window))
            raise UserError(
                f"document {document} has {self._lengths[document]} tokens, over data.context_window = "
                f"{config.context_window} ({summary.overlong} documents are); raise it or set data.overlong = 'split'"
            )
        dropped = summary.overlong if config.overlong == "drop" else 0
        if summary.documents - summary.empty - dropped <= 0:
            raise UserError(
                f"nothing to train on in token store {config.store}: of {summary.documents} documents {summary.empty} "
                f"are empty and {dropped} dropped as longer than data.context_window = {config.context_window}"
            )


def finished_documents(segments: Iterable[Segment], lengths: NDArray[np.int64], truncated_to: int | None) -> list[int]:
    """Ids of the documents whose last trained token is in ``segments``, ascending.

    ``lengths`` are tokens per document of the store; ``truncated_to`` is where ``data.overlong = "truncate"`` cuts,
    None for other policies. Over an epoch every trained document is in the result of exactly one step, however it
    was split.
    """
    rows = np.asarray([*segments], dtype=np.int64).reshape(-1, 3)
    ends = lengths[rows[:, 0] % len(lengths)]
    if truncated_to is not None:
        ends = np.minimum(ends, truncated_to)
    finished: list[int] = np.sort(rows[rows[:, 1] + rows[:, 2] == ends, 0]).tolist()
    return finished
