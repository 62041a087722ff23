"""Segments, the pieces of documents that everything downstream handles, and the policies for overlong documents.

Packing, sharding and loading never see tokens. They see which document a run of tokens comes from, where in that
document it starts, and how long it is. A whole document is a segment that starts at 0.

Attention spans at most one context window, so a longer document is split into pieces (the default), truncated, dropped,
or refused. All of this is counted: the reports of successive batches add up to the report of the stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from wlb.errors import UserError, choose_from

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

    def __add__(self, other: OverlongReport) -> OverlongReport:
        sums = self.documents + other.documents, self.pieces + other.pieces
        return OverlongReport(*sums, self.tokens_dropped + other.tokens_dropped)


def split_overlong(
    segments: Iterable[Segment], limit: int, policy: str = "split"
) -> tuple[list[Segment], OverlongReport]:
    """Apply ``policy`` to every segment of more than ``limit`` tokens; the others pass unchanged, in order.

    ``split`` cuts pieces of ``limit`` tokens, the last one shorter; ``truncate`` keeps the first ``limit``
    tokens; ``drop`` removes the segment; ``error`` raises ``UserError`` for the first one. Splitting into more than
    20 million pieces raises ``UserError`` too.
    """
    if policy not in POLICIES:
        raise UserError(f"overlong policy {policy!r} is unknown; {choose_from(policy, POLICIES)}")
    if limit < 1:
        raise UserError(f"the limit on document length is {limit} tokens; it must be at least 1")
    kept = list(segments)
    overlong = [segment for segment in kept if segment.length > limit]
    if not overlong:
        return kept, OverlongReport()
    if policy == "error":
        document, _, length = overlong[0]
        raise UserError(
            f"document {document} has {length} tokens, over the context window of {limit}; raise the context window "
            f"or choose another policy for overlong documents: {', '.join(POLICIES[:-1])}"
        )
    pieces = sum(-(-segment.length // limit) for segment in overlong) if policy == "split" else 0
    if pieces > _MOST_PIECES:
        longest = max(overlong, key=lambda segment: segment.length)
        raise UserError(
            f"documents over the context window of {limit} tokens make {pieces} pieces, over {_MOST_PIECES}; "
            f"the longest, document {longest.document}, has {longest.length} tokens; raise the context window"
        )
    result: list[Segment] = []
    for segment in kept:
        document, start, length = segment
        if length <= limit:
            result.append(segment)
        elif policy == "truncate":
            result.append(Segment(document, start, limit))
        elif policy == "split":
            result += [Segment(document, start + at, min(limit, length - at)) for at in range(0, length, limit)]
    pieces = len(result) - (len(kept) - len(overlong))
    dropped = sum(s.length for s in kept) - sum(s.length for s in result)
    return result, OverlongReport(len(overlong), pieces, dropped)
