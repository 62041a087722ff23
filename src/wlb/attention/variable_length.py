"""The unit that every back end computes: sequences of queries, each against its own sequence of keys."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class VariableLengthBatch:
    """Packed queries and keys; the queries of sequence i attend the keys of sequence i and no others.

    Lengths are in tokens, at least 1, and in the order of the tensors. With ``causal`` the queries and keys of a
    sequence are the same tokens, and each query attends the keys up to its own. Without it each query attends all keys
    of its sequence, in any order.

    With a ``window``, which needs ``causal``, the keys of a sequence may begin earlier: the last ones are the tokens of
    its queries, and each query attends the last ``window`` keys up to its own.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    causal: bool
    window: int | None = None

    @classmethod
    def of_segments(cls, segment_lengths: tuple[int, ...], window: int | None = None) -> Self:
        """Causal attention inside each of the segments."""
        return cls(segment_lengths, segment_lengths, True, window)
