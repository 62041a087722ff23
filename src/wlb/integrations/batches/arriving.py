"""Documents that are read once and have no number: of a generator, or of a data set that is streamed.

They are planned in the order in which they come, and kept until all of them has been trained. A stream is continued by
reading it again from its beginning, which passes over what was trained.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from wlb.documents.segments import Segment
from wlb.documents.store.reader import StoredLengths
from wlb.errors import UserError

T = TypeVar("T")

_AHEAD = 64  # documents that are read before they are planned
_MOST_DROPPED = 10_000  # documents in a row that are too long, before a stream is not read further


class ArrivingDocuments(StoredLengths, Generic[T]):
    """Lengths of documents in order of arrival, for a planner, and the documents that wait.

    A document is numbered by its place in the stream. ``length_of`` counts its tokens; those of more than ``longest``
    are not planned, and let go with the next that are trained. ``kept`` has those that wait by number, ``lengths`` the
    tokens of all that have come. Raises ``UserError`` for an empty stream, and on the way for an empty document and for
    10,000 in a row that are too long.
    """

    def __init__(self, documents: Iterable[T], length_of: Callable[[T], int], longest: float = np.inf) -> None:
        self._arriving, self._length_of, self._longest = iter(documents), length_of, longest
        self.kept: dict[int, T] = {}
        self.lengths, self.tokens, self._planned = array("q"), 0, 0
        self._too_long: set[int] = set()
        self._in_a_row = 0  # that are too long, up to the last that came
        self._read(_AHEAD)
        while len(self._too_long) == len(self.lengths) and self._read(len(self.lengths) + _AHEAD):
            pass  # until there is one to plan
        if not self.lengths:
            raise UserError("the stream has no documents; give at least one")

    def __len__(self) -> int:
        """Documents that have come: more than are planned, but for the end of the stream."""
        self._read(self._planned + _AHEAD)
        return len(self.lengths)

    def __getitem__(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of ``documents``, which are ascending and are planned by that."""
        self._planned = max(self._planned, int(documents[-1]) + 1)
        return np.array([self.lengths[document] for document in documents], np.int64)

    def forget(self, documents: Iterable[int]) -> None:
        """Let go of ``documents``, of which no part waits any more, and of those that are too long."""
        for document in self._too_long.union(documents):
            self.kept.pop(document, None)
        self._too_long.clear()
        self._in_a_row = 0

    def digest(self, documents: int) -> int:
        """Of the lengths of the first ``documents`` documents."""
        return zlib.crc32(self.lengths[:documents].tobytes())

    def read_again(self, documents: int, digest: int, waiting: Iterable[Segment]) -> None:
        """Pass over the first ``documents`` documents but for those of which segments are ``waiting``.

        Raises ``UserError`` where they are fewer, or others than ``digest`` is of.
        """
        kept = {segment.document for segment in waiting}
        for number in range(documents):
            self._read(number + 1)
            self._too_long = self._too_long - kept
            self.forget({number} - kept)
        if len(self.lengths) < documents or self.digest(documents) != digest:
            other = f"the first {documents} documents of the saved stream are not the first of this one, of which"
            raise UserError(f"{other} {len(self.lengths)} were read; continue with the stream it was saved on")

    def _read(self, documents: int) -> bool:
        """Read on up to so many documents in all; whether there are as many."""
        for document in islice(self._arriving, max(0, documents - len(self.lengths))):
            number, length = len(self.lengths), self._length_of(document)
            if length < 1:
                raise UserError(f"document {number} of the stream has no tokens; leave empty documents out")
            self.lengths.append(length)
            self.tokens += length
            self.kept[number] = document
            if is_too_long := length > self._longest:
                self._too_long.add(number)
            self._in_a_row = is_too_long * (self._in_a_row + 1)
            if self._in_a_row == _MOST_DROPPED:
                over = f"{_MOST_DROPPED:,} documents of the stream in a row are over context_window = {self._longest}"
                raise UserError(f'{over}, and overlong = "drop"; raise it, or split or truncate them')
        return len(self.lengths) >= documents
