"""The documents that fill some steps, cut as a data loader would."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from wlb.documents.segments import OverlongReport, Segment, split_overlong
from wlb.simulate.filling import check_filling, trained_lengths


def documents_for(
    lengths: NDArray[np.int64],
    micro_batches: int,
    context_window: int,
    *,
    overlong: str = "split",
    steps: int | None = None,
) -> tuple[list[Segment], OverlongReport]:
    """The documents of ``lengths`` as segments that fit the window; with ``steps``, only as many as fill those steps.

    A step takes ``micro_batches`` windows. ``overlong`` is a policy of ``wlb.documents.segments``, or "cut" for
    ``cut_at_windows``. Raises ``UserError`` where ``check_filling`` does.
    """
    step_tokens = micro_batches * context_window
    if steps is not None:
        lengths = lengths[: documents_filling(trained_lengths(lengths, context_window, overlong), steps * step_tokens)]
    check_filling(lengths, step_tokens, context_window, overlong=overlong, steps=steps)
    whole = [Segment(document, 0, length) for document, length in enumerate(lengths.tolist())]
    if overlong == "cut":
        return cut_at_windows(whole, context_window), OverlongReport()
    return split_overlong(whole, context_window, overlong)


def cut_at_windows(documents: Iterable[Segment], window: int) -> list[Segment]:
    """``documents`` in their order, each cut where a window of ``window`` tokens of the stream ends.

    This is how the paper's data loader cuts them (WLB-LLM, section 2.1), before they are packed.
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
    """How many documents from the front hold at least ``tokens`` tokens, or all of them."""
    return min(len(lengths), int(np.searchsorted(np.cumsum(lengths), tokens)) + 1)
