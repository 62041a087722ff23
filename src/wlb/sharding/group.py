"""What a context-parallel group spends on its layers, from what its ranks compute and where they wait for each other.

As ``wlb.attention.context_parallel`` runs a layer. Forward, ranks meet where keys and values arrive, with the part of
their attention that needs them still to come. Backward, they meet where the gradients of what they received come home;
and where they did not keep it, once more before that, where keys and values arrive again.

Every layer takes its share of the seconds, so those of all layers wait as those of one do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


class RankSeconds(NamedTuple):
    """What ranks compute in a forward, or in a backward; ranks are the last axis of every array."""

    own: Seconds  # attention among the rank's own tokens
    received: Seconds  # attention over keys of other ranks
    rest: Seconds  # everything else


def slowest_rank(seconds: Seconds) -> Seconds:
    """The most over the last axis."""
    most: Seconds = seconds.max(axis=-1)
    return most


def forward_seconds(
    ranks: RankSeconds, exchange: Seconds, together: Callable[[Seconds], Seconds] = slowest_rank
) -> Seconds:
    """Seconds of groups; an ``exchange`` for each, ``together`` makes theirs of those of their ranks."""
    return np.maximum(
        together(ranks.own + ranks.received + ranks.rest),
        exchange + together(ranks.received + ranks.rest),
    )


def backward_seconds(
    ranks: RankSeconds,
    exchange: Seconds,
    kept: NDArray[np.bool_],
    together: Callable[[Seconds], Seconds] = slowest_rank,
) -> Seconds:
    """As ``forward_seconds``; ``kept`` says of each group whether it keeps what it receives in the forward."""
    one_meeting = forward_seconds(ranks, exchange, together)
    sent_again = exchange + together(ranks.rest) + together(ranks.received)
    two_meetings = exchange + np.maximum(together(ranks.own + ranks.received + ranks.rest), sent_again)
    return np.where(kept, one_meeting, two_meetings)
