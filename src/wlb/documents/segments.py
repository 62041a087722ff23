"""Segments, the pieces of documents that everything downstream handles, and the policies for overlong documents.

Packing, sharding and loading never see tokens. They see which document a run of tokens comes from, where in that
document it starts, and how long it is. A whole document is a segment that starts at 0.

Attention spans at most one context window, so a longer document is split into pieces (the default), truncated, dropped,
or refused. All of this is counted: the reports of successive batches add up to the report of the stream.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError, check_known

POLICIES = ("split", "truncate", "drop", "error")
_MOST_PIECES = 20_000_000  # per call; more would take gigabytes, and the window is surely a mistake


class Segment(NamedTuple):
    """``length`` consecutive tokens of document ``document``, from its token ``start`` on."""

    document: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class OverlongReport:
    """How many documents were over the limit, and what became of them.

    ``pieces`` counts the segments that replaced them, ``tokens_dropped`` the tokens that will not be trained.
    """

    documents: int = 0
    pieces: int = 0
    tokens_dropped: int = 0

    def __add__(self, other: "OverlongReport") -> "OverlongReport":
        sums = self.documents + other.documents, self.pieces + other.pieces
        return OverlongReport(*sums, self.tokens_dropped + other.tokens_dropped)


def split_overlong(
    segments: NDArray[np.int64], limit: int, policy: str = "split"
) -> tuple[NDArray[np.int64], OverlongReport]:
    """Apply ``policy`` to all ``segments`` of more than ``limit`` tokens; the others pass unchanged, in order.

    An array of segments has shape (segments, 3): document, start, length. ``split`` cuts pieces of ``limit`` tokens,
    the last one shorter; ``truncate`` keeps the first ``limit`` tokens; ``drop`` removes the segment; ``error`` raises
    ``UserError`` for the first one. Splitting into more than 20 million pieces raises ``UserError`` too.
    """
    check_known("overlong policy", policy, POLICIES)
    if limit < 1:
        raise UserError(f"the limit on document length is {limit} tokens; it must be at least 1")
    lengths = segments[:, 2]
    overlong = lengths > limit
    if not overlong.any():
        return segments, OverlongReport()
    if policy == "error":
        document, _, length = segments[overlong][0]
        raise UserError(
            f"document {document} has {length} tokens, over the context window of {limit}; raise the context window "
            f"or choose another policy for overlong documents: {', '.join(POLICIES[:-1])}"
        )
    parts = -(-lengths // limit) if policy == "split" else np.full_like(lengths, policy == "truncate")
    parts[~overlong] = 1
    if (pieces := int(parts[overlong].sum())) > _MOST_PIECES:
        document, _, length = segments[lengths.argmax()]
        raise UserError(
            f"documents over the context window of {limit} tokens make {pieces} pieces, over {_MOST_PIECES}; "
            f"the longest, document {document}, has {length} tokens; raise the context window"
        )
    result = np.repeat(segments, parts, axis=0)
    taken = limit * (np.arange(len(result)) - np.repeat(np.cumsum(parts) - parts, parts))  # by the pieces before
    result[:, 1] += taken
    result[:, 2] = np.minimum(result[:, 2] - taken, limit)
    return result, OverlongReport(int(overlong.sum()), pieces, int(lengths.sum() - result[:, 2].sum()))
