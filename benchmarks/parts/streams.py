"""Documents as a packer meets them: a stream of as many tokens as steps need, dealt a few documents at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from wlb.documents.filling import documents_filling
from wlb.documents.segments import Segment


def first_steps(lengths: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """``lengths`` from the front, over and over if need be, up to ``tokens`` tokens."""
    stream = np.tile(lengths, math.ceil(tokens / int(lengths.sum())))
    return stream[: documents_filling(stream, tokens)]


def batched(lengths: NDArray[np.int64], documents: int) -> Iterator[list[Segment]]:
    """The stream, ``documents`` at a time; a document's id is its position."""
    for first in range(0, len(lengths), documents):
        chunk = lengths[first : first + documents].tolist()
        yield [Segment(document, 0, length) for document, length in enumerate(chunk, first)]
