"""Documents that are read once and have no number: of a generator, or of a data set that is streamed.

They are planned in the order in which they come. A document is kept until all of it has been trained, and everything
before the oldest that waits is gone; so a stream is continued by reading it again from its beginning, which passes over
what was trained.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from wlb.documents.order import Stream
from wlb.documents.segments import OverlongReport, Segment, split_overlong
from wlb.errors import UserError

T = TypeVar("T")


class ArrivingDocuments(Stream, Generic[T]):
    """Documents in order of arrival, in one epoch, and those that wait.

    The id of a document is its place in the stream. ``length_of`` counts its tokens. Documents over ``context_window``
    tokens meet the policy ``overlong`` of ``wlb.documents.segments``. Raises ``UserError`` for an empty stream, and on
    the way for an empty document.
    """

    epoch = 0

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
        self._lengths = np.zeros(1024, np.int64)
        self._taken = 0
        self.digest = 0  # of the lengths of all documents that have come, in their order
        self._kept: dict[int, T] = {}
        self._tokens_left = Counter[int]()  # of every document that is kept
        self._over = False

    @property
    def epoch_is_over(self) -> bool:
        return self._over

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document that has come so far, shape (documents,)."""
        return self._lengths[: self._taken]

    def __getitem__(self, document: int) -> T:
        """A document that waits."""
        return self._kept[document]

    def take(self, documents: int) -> list[Segment]:
        """The segments of the next ``documents`` documents, or of as many as the stream has."""
        arrived = [self._arrive(document) for document in islice(self._documents, documents)]
        self._over = len(arrived) < documents
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
        if self._taken:
            raise UserError("a stream is continued from its beginning; open it anew and give the state with it")
        for document, _, length in waiting:
            self._tokens_left[document] += length
        for passed_over in islice(self._documents, documents):
            self._arrive(passed_over)
            if self._taken - 1 not in self._tokens_left:
                del self._kept[self._taken - 1]
        wrong = ""
        if self._taken < documents:
            wrong = f"the state is of a stream of which {documents} documents had come, this one has {self._taken}"
        elif self.digest != state["digest"]:
            wrong = f"the first {documents} documents of this stream have other lengths than those of the state"
        if wrong:
            raise UserError(f"{wrong}; continue with the stream it was saved on")

    def next_epoch(self) -> None:
        raise UserError("a stream has one epoch; let it repeat its documents, or give a sequence of them")

    def begin(self, epoch: int) -> None:
        """Nothing: a stream is where it is."""

    def state_dict(self) -> dict[str, Any]:
        come = {"documents": self._taken, "digest": self.digest}
        return {**come, "over": self.epoch_is_over, "overlong": asdict(self._overlong)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, after ``read_again``."""
        self._over = state["over"]
        self._overlong = OverlongReport(**state["overlong"])

    def _arrive(self, document: T) -> Segment:
        number, length = self._taken, self._length_of(document)
        if length < 1:
            raise UserError(f"document {number} of the stream has no tokens; leave empty documents out")
        if number == len(self._lengths):
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
        self._lengths[number] = length
        self.digest = zlib.crc32(length.to_bytes(8, "little"), self.digest)
        self._kept[number] = document
        self._taken += 1
        return Segment(number, 0, length)
