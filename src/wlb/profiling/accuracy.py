"""How well a workload predicts what was measured at sizes that it has not seen."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.profiling.measure import HeldOutSeconds
from wlb.workload import Costs

_LONGEST_CROSSOVER = 10_000_000  # tokens


@dataclass(frozen=True)
class Accuracy:
    """Errors of predictions, as shares of the measured seconds."""

    shapes: str
    count: int
    median: float
    worst: float


def prediction_errors(workload: Costs, held_out: HeldOutSeconds) -> list[Accuracy]:
    """Errors of ``workload`` on documents, on context-parallel pieces of them, and on whole micro-batches."""
    sizes = held_out.sizes
    starts, stops = np.array(sizes.pieces).T
    micro_batches = [micro_batch_seconds(workload, lengths) for lengths in sizes.micro_batches]
    return [
        _accuracy("documents", workload.attention_seconds(sizes.documents), held_out.documents),
        _accuracy("pieces of documents", workload.piece_seconds(starts, stops), held_out.pieces),
        _accuracy("micro-batches", micro_batches, held_out.micro_batches),
    ]


def micro_batch_seconds(workload: Costs, segment_lengths: Sequence[int]) -> float:
    """W_a + W_l of a micro-batch."""
    return float(workload.attention_seconds(segment_lengths).sum() + workload.linear_seconds(sum(segment_lengths)))


def crossover_tokens(workload: Costs) -> int | None:
    """Length at which a document's attention costs as much as everything else; None if over ten million tokens."""
    lengths = range(1, _LONGEST_CROSSOVER + 1)
    shorter = bisect_left(lengths, 0.0, key=lambda n: float(workload.attention_seconds(n) - workload.linear_seconds(n)))
    return lengths[shorter] if shorter < len(lengths) else None


def _accuracy(shapes: str, predicted: ArrayLike, measured: ArrayLike) -> Accuracy:
    truth: NDArray[np.float64] = np.asarray(measured, dtype=np.float64)
    errors = np.abs(np.asarray(predicted) / truth - 1)
    return Accuracy(shapes, len(errors), float(np.median(errors)), float(errors.max()))
