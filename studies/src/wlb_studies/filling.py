"""The documents that fill some steps, cut as a data loader would."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from wlb.documents.segments import POLICIES, OverlongReport, Segment, split_overlong
from wlb.errors import UserError, choose_from
from wlb.packing.packer import rows_of, segments_of
from wlb.simulate.filling import check_filling, trained_lengths


def documents_for(
    lengths: NDArray[np.int64],
    micro_batches: int,
    context_window: int,
    *,
    overlong: str = "split",
    steps: int | None = None,
) -> tuple[list[Segment], OverlongReport]:
    """The documents of ``lengths`` as segments that fit in the window; with ``steps``, only enough for those steps.

    A step takes ``micro_batches`` windows. ``overlong`` is a policy of ``wlb.documents.segments``, or "cut" for
    ``cut_at_windows``. Raises ``UserError`` like ``check_filling``.
    """
    if overlong not in (known := (*POLICIES, "cut")):
        raise UserError(f"overlong policy {overlong!r} is unknown; {choose_from(overlong, known)}")
    step_tokens = micro_batches * context_window
    if steps is not None:
        lengths = lengths[: documents_filling(trained_lengths(lengths, context_window, overlong), steps * step_tokens)]
    check_filling(lengths, step_tokens, context_window, overlong=overlong, steps=steps)
    whole = [Segment(document, 0, length) for document, length in enumerate(lengths.tolist())]
    if overlong == "cut":
        return cut_at_windows(whole, context_window), OverlongReport()
    pieces, report = split_overlong(rows_of(whole), context_window, overlong)
    return segments_of(pieces), report


def cut_at_windows(documents: Iterable[Segment], window: int) -> list[Segment]:
    """``documents`` in order, cut wherever a window of ``window`` tokens of the stream ends.

    The paper's data loader cuts documents this way before packing (WLB-LLM, section 2.1).
    """
    pieces: list[Segment] = []
    room = window
    for document, start, length in documents:
        end = start + length
        while start < end:
            taken = min(end - start, room)
            pieces.append(Segment(document, start, taken))
            start += taken
            room = room - taken or window
    return pieces


def documents_filling(lengths: NDArray[np.int64], tokens: int) -> int:
    """The number of leading documents that hold at least ``tokens`` tokens, or of all documents."""
    return min(len(lengths), int(np.searchsorted(np.cumsum(lengths), tokens)) + 1)
