"""The documents of each step, and whether the documents fill a step."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.documents.order import DataConfig, DocumentStream
from wlb.documents.store.reader import DocumentLengths
from wlb.errors import UserError

_AT_ONCE = 64  # documents taken together
_MOST_STEPS_OF_ONE = 64  # that a single document may fill if fewer steps are asked for


def check_filling(
    lengths: NDArray[np.int64], step_tokens: int, context_window: int, *, overlong: str = "split", steps: int | None
) -> None:
    """Raise ``UserError`` if documents, repeated as needed, do not represent ``steps`` steps.

    Documents that do not fill one step would be in it several times. A single document that holds most of the tokens,
    and fills far more steps than are asked for, would hide all others; ``steps`` None means all steps that they fill.
    """
    trained = trained_lengths(lengths, context_window, overlong)
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


def global_batches(lengths: DocumentLengths, config: DataConfig, tokens: int) -> Iterator[NDArray[np.int64]]:
    """The lengths of the documents that begin in each ``tokens`` tokens of their stream, epoch after epoch."""
    stream, left = DocumentStream(lengths, config), tokens
    batch: list[int] = []
    while True:
        if stream.epoch_is_over:
            stream.next_epoch()
        for length in stream.take(_AT_ONCE)[:, 2].tolist():
            if left <= 0:
                yield np.array(batch)
                batch, left = [], left + tokens
            batch.append(length)
            left -= length


def joined_lengths(lengths: NDArray[np.int64] | Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The lengths of all documents in the order of their ids, shape (documents,)."""
    return np.concatenate(lengths) if isinstance(lengths, Sequence) else lengths


def trained_lengths(lengths: NDArray[np.int64], limit: int, overlong: str) -> NDArray[np.int64]:
    """Tokens of each document that remain after the policy for overlong documents."""
    if overlong == "truncate":
        return np.minimum(lengths, limit)
    return np.where(lengths > limit, 0, lengths) if overlong == "drop" else lengths
