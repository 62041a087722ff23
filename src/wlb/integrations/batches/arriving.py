"""Documents that are read once and have no number: of a generator, or of a data set that is streamed.

They are planned in the order in which they come. A document is kept until all of it has been trained, and everything
before the oldest that waits is gone; so a stream is continued by reading it again from its beginning, which passes over
what was trained.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import chain, islice
from typing import Any, Generic, TypeVar

from wlb.documents.order import Stream
from wlb.documents.segments import OverlongReport, Segment, split_overlong
from wlb.errors import UserError

T = TypeVar("T")


class ArrivingDocuments(Stream, Generic[T]):
    """Documents in order of arrival, in one epoch, and those that wait.

    The id of a document is its place in the stream. ``length_of`` counts its tokens; ``lengths`` has those of all that
    have come. Documents over ``context_window`` tokens meet the policy ``overlong`` of ``wlb.documents.segments``.
    Raises ``UserError`` for an empty stream, and on the way for an empty document.
    """

    epoch = 0
    epoch_is_over = False

    def __init__(
        self, documents: Iterable[T], length_of: Callable[[T], int], context_window: int, overlong: str
    ) -> None:
        arriving = iter(documents)
        beginning = list(islice(arriving, 1))
        if not beginning:
            raise UserError("the stream has no documents; give at least one")
        self._documents = chain(beginning, arriving)
        self._length_of, self._context_window, self._policy = length_of, context_window, overlong
        self._overlong = OverlongReport()  # of all documents taken
        self.lengths = array("q")
        self._digest = 0  # of the lengths of all documents that have come, in their order
        self._kept: dict[int, T] = {}
        self._tokens_left = Counter[int]()  # of every document that is kept

    def __getitem__(self, document: int) -> T:
        """A document that waits."""
        return self._kept[document]

    def take(self, documents: int) -> list[Segment]:
        """The segments of the next ``documents`` documents, or of as many as the stream has."""
        arrived = [self._arrive(document) for document in islice(self._documents, documents)]
        self.epoch_is_over = len(arrived) < documents
        segments, report = split_overlong(arrived, self._context_window, self._policy)
        self._overlong += report
        for document, _, length in segments:
            self._tokens_left[document] += length
        for document, _, _ in arrived:
            if document not in self._tokens_left:  # dropped, as it is too long
                del self._kept[document]
        return segments

    def trained(self, segments: Iterable[Segment]) -> None:
        """Let go of the documents of which these were the last segments."""
        for document, _, length in segments:
            self._tokens_left[document] -= length
            if self._tokens_left[document] == 0:
                del self._tokens_left[document], self._kept[document]

    def read_again(self, state: Mapping[str, Any], waiting: Iterable[Segment]) -> None:
        """Go to where the stream of ``state`` was, keeping the documents of which segments are ``waiting``.

        Raises ``UserError`` unless the stream is at its beginning, and where it is shorter or of other documents.
        """
        documents = state["documents"]
        if self.lengths:
            raise UserError("a stream is continued from its beginning; open it anew and give the state with it")
        for document, _, length in waiting:
            self._tokens_left[document] += length
        for passed_over in islice(self._documents, documents):
            number = self._arrive(passed_over).document
            if number not in self._tokens_left:
                del self._kept[number]
        if len(self.lengths) < documents or self._digest != state["digest"]:
            raise UserError(
                f"the first {documents} documents of the saved stream are not the first of this one, of which "
                f"{len(self.lengths)} were read; continue with the stream it was saved on"
            )

    def next_epoch(self) -> None:
        raise UserError("a stream has one epoch; let it repeat its documents, or give a sequence of them")

    def begin(self, epoch: int) -> None:
        """Nothing: a stream is where it is."""

    def state_dict(self) -> dict[str, Any]:
        come = {"documents": len(self.lengths), "digest": self._digest}
        return {**come, "over": self.epoch_is_over, "overlong": asdict(self._overlong)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, after ``read_again``."""
        self.epoch_is_over = state["over"]
        self._overlong = OverlongReport(**state["overlong"])

    def _arrive(self, document: T) -> Segment:
        number, length = len(self.lengths), self._length_of(document)
        if length < 1:
            raise UserError(f"document {number} of the stream has no tokens; leave empty documents out")
        self.lengths.append(length)
        self._digest = zlib.crc32(length.to_bytes(8, "little"), self._digest)
        self._kept[number] = document
        return Segment(number, 0, length)
