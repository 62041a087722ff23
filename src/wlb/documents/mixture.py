"""Documents of several stores, taken so that each store keeps its share of the tokens.

The next document comes from the store that is furthest behind: the one with the fewest tokens taken for its weight. So
after any document the share of a store is off by at most about one of its documents, and nothing is drawn at random.
Every store has its own epochs and passes each of its documents once in each; one that is used up begins its next
epoch while the others go on. A round of the mixture ends when every store has finished an epoch in it.

Documents are counted through all stores: document i of a store has the index ``first + i``, with ``first`` documents in
the stores before it, and the id ``epoch * documents of all stores + first + i``, with the epoch of its store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.arriving import ArrivingDocuments
from wlb.documents.order import DataConfig, DocumentStream, StorePlace, ids_used
from wlb.documents.overlong import OverlongReport
from wlb.documents.segments import Segment
from wlb.documents.store.lengths import DocumentLengths, Lengths

_DOCUMENTS_AT_ONCE = 64


def document_stream(
    documents: DocumentLengths | ArrivingDocuments[Any], config: DataConfig
) -> DocumentStream | MixtureStream | ArrivingDocuments[Any]:
    """The documents of a job in their order: stored ones as ``config`` says, those of a stream as they come."""
    if isinstance(documents, ArrivingDocuments):
        return documents
    return stored_documents(documents, config)


def stored_documents(lengths: DocumentLengths, config: DataConfig) -> DocumentStream | MixtureStream:
    """The documents of one store, or of the stores of ``config.mixture``, in their order."""
    return MixtureStream(lengths, config) if isinstance(lengths, Sequence) else DocumentStream(lengths, config)


def global_batches(lengths: DocumentLengths, config: DataConfig, tokens: int) -> Iterator[NDArray[np.int64]]:
    """The lengths of the documents that begin in each ``tokens`` tokens of their stream, epoch after epoch."""
    stream, left = stored_documents(lengths, config), tokens
    batch: list[int] = []
    while True:
        if stream.epoch_is_over:
            stream.next_epoch()
        for segment in stream.take(_DOCUMENTS_AT_ONCE):
            if left <= 0:
                yield np.array(batch)
                batch, left = [], left + tokens
            batch.append(segment.length)
            left -= segment.length


def joined_lengths(lengths: NDArray[np.int64] | Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The lengths of all documents as they are counted, shape (documents,)."""
    return np.concatenate(lengths) if isinstance(lengths, Sequence) else lengths


class MixtureStream:
    """A ``DocumentStream`` over the stores of ``config.mixture``, whose documents have ``lengths`` tokens each.

    Taken a few documents at a time and never across the end of a round. Raises ``UserError`` if a store leaves nothing
    to train on, and ``ValueError`` unless there are lengths of every store.
    """

    def __init__(self, lengths: Sequence[Lengths], config: DataConfig) -> None:
        if len(lengths) != len(config.mixture):
            raise ValueError(f"lengths are of {len(lengths)} stores, data.mixture names {len(config.mixture)}")
        firsts = np.cumsum([0, *map(len, lengths)]).tolist()
        self._documents: int = firsts[-1]
        self._streams = [
            DocumentStream(of_store, config, StorePlace(number, firsts[number], self._documents))
            for number, of_store in enumerate(lengths)
        ]
        self._weights = config.weights
        self._tokens = [0] * len(lengths)  # taken from each store, since these weights hold
        self._round = 0
        self._unfinished = set(range(len(lengths)))  # stores that have not finished an epoch in this round

    @property
    def epoch_is_over(self) -> bool:
        """Whether the round is: every store has finished an epoch."""
        return not self._unfinished

    def take(self, documents: int) -> list[Segment]:
        """The segments of the next ``documents`` documents, or of as many as the round has."""
        segments: list[Segment] = []
        for _ in range(documents):
            if self.epoch_is_over:
                break
            number = min(range(len(self._streams)), key=self._progress)
            stream = self._streams[number]
            if stream.epoch_is_over:
                stream.next_epoch()
            taken = stream.take(1)
            self._tokens[number] += sum(segment.length for segment in taken)
            segments += taken
            if stream.epoch_is_over:
                self._unfinished.discard(number)
        return segments

    @property
    def epoch(self) -> int:
        """The round that the next documents are of, or the last ones were where it is over."""
        return self._round

    def next_epoch(self) -> None:
        """Begin the next round, where the stores are."""
        self._round += 1
        self._unfinished = set(range(len(self._streams)))

    def begin(self, epoch: int) -> None:
        """Begin round ``epoch``, with that epoch of every store."""
        for stream in self._streams:
            stream.begin(epoch)
        self._round = epoch
        self._unfinished = set(range(len(self._streams)))

    def state_dict(self) -> dict[str, Any]:
        states = [stream.state_dict() for stream in self._streams]
        overlong = sum((OverlongReport(**state["overlong"]) for state in states), OverlongReport())
        return {
            "documents": self._documents,
            "stores": states,
            "weights": list(self._weights),
            "tokens": list(self._tokens),
            "round": self._round,
            "unfinished": sorted(self._unfinished),
            "overlong": asdict(overlong),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue on the same stores. Where weights have changed, shares are counted from here on."""
        for stream, saved in zip(self._streams, state["stores"], strict=True):
            stream.load_state_dict(saved)
        same = state["weights"] == list(self._weights)
        self._tokens = list(state["tokens"]) if same else [0] * len(self._streams)
        self._round = state["round"]
        self._unfinished = set(state["unfinished"])

    def begin_after(self, state: dict[str, Any]) -> None:
        """Begin with an epoch of every store whose ids are above all that the documents of ``state`` can have had."""
        first, *others = self._streams
        first.begin_after(state)  # counts what became of the overlong documents of ``state``
        for stream in others:
            stream.begin(-(-ids_used(state) // self._documents))

    def _progress(self, number: int) -> float:
        return self._tokens[number] / self._weights[number]
