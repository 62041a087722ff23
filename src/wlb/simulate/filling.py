"""The documents of steps: as many as fill some, those that begin in each, and which ones fill none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.documents.order import DataConfig, DocumentStream
from wlb.documents.segments import OverlongReport, Segment, split_overlong
from wlb.documents.store.reader import DocumentLengths
from wlb.errors import UserError

_AT_ONCE = 64  # documents taken together
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

    A step takes ``micro_batches`` windows. ``overlong`` is a policy of ``wlb.documents.segments``, or "cut" for
    ``cut_at_windows``. Raises ``UserError`` where ``check_filling`` does.
    """
    step_tokens = micro_batches * context_window
    if steps is not None:
        lengths = lengths[: documents_filling(_trained_lengths(lengths, context_window, overlong), steps * step_tokens)]
    check_filling(lengths, step_tokens, context_window, overlong=overlong, steps=steps)
    whole = [Segment(document, 0, length) for document, length in enumerate(lengths.tolist())]
    if overlong == "cut":
        return cut_at_windows(whole, context_window), OverlongReport()
    return split_overlong(whole, context_window, overlong)


def check_filling(
    lengths: NDArray[np.int64], step_tokens: int, context_window: int, *, overlong: str = "split", steps: int | None
) -> None:
    """Raise ``UserError`` where documents that are repeated as needed cannot show what ``steps`` steps take.

    Those that do not fill one step would be in it several times. One that holds most of the tokens, and fills far more
    steps than are asked for, would be all that is shown; all steps that they fill are, where ``steps`` is None.
    """
    trained = _trained_lengths(lengths, context_window, overlong)
    if trained.sum() < step_tokens:
        raise UserError(
            f"the documents have {trained.sum()} tokens, and one step takes {step_tokens}; give more documents, a "
            "smaller global batch or a smaller context window"
        )
    longest = int(trained.argmax())
    most = max(steps or 0, _MOST_STEPS_OF_ONE)
    if steps is not None and trained[longest] > max(most * step_tokens, trained.sum() / 2):
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


def global_batches(lengths: DocumentLengths, config: DataConfig, tokens: int) -> Iterator[NDArray[np.int64]]:
    """The lengths of the documents that begin in each ``tokens`` tokens of their stream, epoch after epoch."""
    stream, left = DocumentStream(lengths, config), tokens
    batch: list[int] = []
    while True:
        if stream.epoch_is_over:
            stream.next_epoch()
        for segment in stream.take(_AT_ONCE):
            if left <= 0:
                yield np.array(batch)
                batch, left = [], left + tokens
            batch.append(segment.length)
            left -= segment.length


def joined_lengths(lengths: NDArray[np.int64] | Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The lengths of all documents as they are counted, shape (documents,)."""
    return np.concatenate(lengths) if isinstance(lengths, Sequence) else lengths


def _trained_lengths(lengths: NDArray[np.int64], limit: int, overlong: str) -> NDArray[np.int64]:
    """Tokens of each document that are left after the policy for overlong ones."""
    if overlong == "truncate":
        return np.minimum(lengths, limit)
    return np.where(lengths > limit, 0, lengths) if overlong == "drop" else lengths
