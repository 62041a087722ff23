"""Documents of a stream, such as a generator or a streamed data set, which is read once and has no length.

They are planned in order of arrival, and each is kept until all of it is trained. A stream is continued by reading it
again from its beginning and skipping the trained documents.
"""

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

_AHEAD = 64  # documents read before they are planned
_MOST_DROPPED = 10_000  # documents in a row over the limit, after which reading stops with an error


class ArrivingDocuments(StoredLengths, Generic[T]):
    """Lengths of documents in order of arrival, for a planner, and the documents that are not trained yet.

    The number of a document is its place in the stream. ``measure`` returns its tokens and a mark of 32 bits that tells
    it from others. One with more than ``longest`` tokens is not planned. ``kept`` has the waiting documents by number,
    ``lengths`` and ``marks`` those of all documents read.
    Raises ``UserError`` for an empty stream or document, and for 10,000 documents in a row over ``longest``.
    """

    def __init__(
        self, documents: Iterable[T], measure: Callable[[T], tuple[int, int]], longest: float = np.inf
    ) -> None:
        self._arriving, self._measure, self._longest = iter(documents), measure, longest
        self.kept: dict[int, T] = {}
        self.lengths, self.marks, self.tokens, self._planned = array("q"), array("Q"), 0, 0
        self._too_long: set[int] = set()
        self._in_a_row = 0  # latest documents over ``longest``
        self._read(_AHEAD)
        while len(self._too_long) == len(self.lengths) and self._read(len(self.lengths) + _AHEAD):
            pass  # read on until there is one to plan
        if not self.lengths:
            raise UserError("the stream has no documents; give at least one")

    def __len__(self) -> int:
        """Documents read so far: more than are planned, until the stream ends."""
        self._read(self._planned + _AHEAD)
        return len(self.lengths)

    def __getitem__(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of ``documents``, in ascending order; this marks them as planned."""
        self._planned = max(self._planned, int(documents[-1]) + 1)
        return np.array([self.lengths[document] for document in documents], np.int64)

    def forget(self, documents: Iterable[int]) -> None:
        """Release ``documents``, which are fully trained, and those over ``longest``."""
        for document in self._too_long.union(documents):
            self.kept.pop(document, None)
        self._too_long.clear()
        self._in_a_row = 0

    def digest(self, documents: int) -> int:
        """A checksum of the lengths and marks of the first ``documents`` documents."""
        return zlib.crc32(self.marks[:documents].tobytes(), zlib.crc32(self.lengths[:documents].tobytes()))

    def read_again(self, documents: int, digest: int, waiting: Iterable[Segment]) -> None:
        """Skip the first ``documents`` documents, except those with ``waiting`` segments.

        Raises ``UserError`` if there are fewer, or if their ``digest`` differs.
        """
        kept = {segment.document for segment in waiting}
        for number in range(documents):
            self._read(number + 1)
            self._too_long = self._too_long - kept
            self.forget({number} - kept)
        if len(self.lengths) < documents or self.digest(documents) != digest:
            raise UserError(f"the stream does not begin with the {documents} trained documents; give the saved stream")

    def _read(self, documents: int) -> bool:
        """Read on until there are ``documents`` in all; returns whether the stream has so many."""
        for document in islice(self._arriving, max(0, documents - len(self.lengths))):
            number, (length, mark) = len(self.lengths), self._measure(document)
            if length < 1:
                raise UserError(f"document {number} of the stream has no tokens; leave empty documents out")
            self.lengths.append(length)
            self.marks.append(mark)
            self.tokens += length
            self.kept[number] = document
            if is_too_long := length > self._longest:
                self._too_long.add(number)
            self._in_a_row = is_too_long * (self._in_a_row + 1)
            if self._in_a_row == _MOST_DROPPED:
                over = f"{_MOST_DROPPED:,} documents of the stream in a row are over context_window = {self._longest}"
                raise UserError(f'{over}, and overlong = "drop"; raise the window, or set "split" or "truncate"')
        return len(self.lengths) >= documents
