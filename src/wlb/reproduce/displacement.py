"""How far packing moves documents from the order in which they arrive, as a training run did it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.documents.order import shuffled


class Displacement(NamedTuple):
    """Steps between a document's place in arrival order and the step that finished it, over all documents finished.

    In arrival order steps follow each other at the run's own pace, its mean tokens a step. ``moved`` is the share of
    tokens that are trained more than a step away from their place.
    """

    mean_steps: float  # without sign, each token counting once
    moved: float
    longest: float


def displacement(
    finished: Sequence[Sequence[int]], tokens: Sequence[int], lengths: NDArray[np.int64], seed: int
) -> Displacement:
    """From the ``finished`` documents and ``tokens`` of every step; ``lengths`` are those of the store."""
    documents = np.array([document for of_step in finished for document in of_step], np.int64)
    step = np.repeat(np.arange(len(finished)), [len(of_step) for of_step in finished])
    epochs = int(documents.max(initial=0)) // len(lengths) + 1
    order = np.concatenate([shuffled(len(lengths), seed, epoch) + epoch * len(lengths) for epoch in range(epochs)])
    ends = np.empty(len(order))
    ends[order] = np.cumsum(lengths[order % len(lengths)])
    place = (ends[documents] - 1) // np.mean(tokens)  # the step in which its last token would be
    weights = lengths[documents % len(lengths)]
    distance = np.abs(step - place)
    return Displacement(
        float(np.average(distance, weights=weights)),
        float(np.average(distance > 1, weights=weights)),
        float(distance.max()),
    )
