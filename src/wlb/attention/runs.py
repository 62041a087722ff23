"""The unit that every back end computes: runs of queries, each against its own run of keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Runs:
    """Packed queries and keys, cut into runs; queries of run i attend the keys of run i and no others.

    Lengths are in tokens, at least 1, and in the order in which the runs follow each other in the tensors. With
    ``causal`` the runs of queries and keys are the same tokens, and each query attends the keys up to its own;
    without it each query attends its whole run of keys, whose order then does not matter.

    With a ``window``, which needs ``causal``, a run of keys may begin earlier: its last keys are the tokens of the run
    of queries, and each query attends the last ``window`` keys up to its own.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    causal: bool
    window: int | None = None

    @classmethod
    def of_segments(cls, segment_lengths: tuple[int, ...], window: int | None = None) -> Runs:
        """Causal attention inside each of the segments."""
        return cls(segment_lengths, segment_lengths, True, window)
