"""As many documents as fill some steps, cut to the context window."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from wlb.documents.overlong import POLICIES, OverlongReport, split_overlong
from wlb.documents.segments import Segment
from wlb.errors import UserError, choose_from

_MOST_STEPS_OF_ONE = 64  # that a document may fill where fewer are asked for


def documents_for(
    lengths: NDArray[np.int64],
    micro_batches: int,
    context_window: int,
    *,
    overlong: str = "split",
    steps: int | None = None,
) -> tuple[list[Segment], OverlongReport]:
    """The documents of ``lengths`` as segments that fit the window; with ``steps``, only as many as fill those steps.

    A step takes ``micro_batches`` windows. ``overlong`` is a policy of ``wlb.documents.overlong``, or "cut" for
    ``cut_at_windows``. Raises ``UserError`` where the documents do not fill one step, and where one document, most of
    them all, fills far more than ``steps``.
    """
    if overlong not in (*POLICIES, "cut"):
        raise UserError(f"overlong policy {overlong!r} is unknown; {choose_from(overlong, [*POLICIES, 'cut'])}")
    step_tokens = micro_batches * context_window
    whole = [Segment(document, 0, length) for document, length in enumerate(lengths.tolist())]
    if steps is not None:
        trained = _trained_lengths(lengths, context_window, overlong)
        whole = whole[: documents_filling(trained, steps * step_tokens)]
        _check_longest(trained[: len(whole)], step_tokens, steps)
    if overlong == "cut":
        documents, report = cut_at_windows(whole, context_window), OverlongReport()
    else:
        documents, report = split_overlong(whole, context_window, overlong)
    _check_fills(sum(document.length for document in documents), step_tokens, "fewer micro-batches")
    return documents, report


def check_filling(
    lengths: NDArray[np.int64], step_tokens: int, context_window: int, *, overlong: str = "split", steps: int
) -> None:
    """Raise ``UserError`` where documents that are repeated as needed cannot show what ``steps`` steps take.

    Those that do not fill one step would be in it several times. One that holds most of the tokens, and fills far more
    steps than are asked for, would be all that is shown.
    """
    trained = _trained_lengths(lengths, context_window, overlong)
    _check_fills(int(trained.sum()), step_tokens, "a smaller global batch")
    _check_longest(trained, step_tokens, steps)


def _check_fills(tokens: int, step_tokens: int, fewer: str) -> None:
    if tokens < step_tokens:
        raise UserError(
            f"the documents have {tokens} tokens, and one step takes {step_tokens}; give more documents, {fewer} or a "
            "smaller context window"
        )


def _check_longest(trained: NDArray[np.int64], step_tokens: int, steps: int) -> None:
    most = max(steps, _MOST_STEPS_OF_ONE)
    longest = int(trained.argmax())
    if trained[longest] > max(most * step_tokens, trained.sum() / 2):
        raise UserError(
            f"document {longest} has {trained[longest]} tokens and alone fills over {most} steps of {step_tokens} "
            "tokens; leave it out, cut it, or take more --steps"
        )


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


def _trained_lengths(lengths: NDArray[np.int64], limit: int, overlong: str) -> NDArray[np.int64]:
    """Tokens of each document that are left after the policy for overlong ones."""
    if overlong == "truncate":
        return np.minimum(lengths, limit)
    return np.where(lengths > limit, 0, lengths) if overlong == "drop" else lengths
