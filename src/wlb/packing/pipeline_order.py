"""In which order a data-parallel rank runs its micro-batches, by what the configured pipeline takes for them.

Micro-batches of unequal workload make pipeline stages wait, and how long depends on their order: heavy ones hide each
other side by side, the best place for them depends on schedule and depth, and light ones at the ends fill and empty
the pipeline sooner. So orders are priced by the makespan of the very schedule (``wlb.schedules``). A rank takes the
best of a few rules. Then, as a step takes as long as its slowest rank, that rank is searched: each round prices, all at
once, orders that rise to a peak and fall again, one for every place of the peak, and the present order with two
micro-batches swapped; the best one is taken until none is better or another rank has become the slowest.

A plan knows one number of a micro-batch, its workload: a third of it is taken for the forward, two for the backward,
equal on all stages. Prices are compared, sorted and added element by element only, so all machines choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations

import numpy as np
from numpy.typing import NDArray

from wlb.packing.plan import MicroBatch
from wlb.schedules.makespan import pipeline_makespans

_ROUNDS = 8
_ROUND_OPERATIONS = 2**19  # that a round may price: a few milliseconds, and 4 MB in each of a few arrays
_EVEN = 1e-3  # of the heaviest micro-batch: between micro-batches this close, no order is worth a search
_GAIN = 1e-4  # of the makespan: a round that gains less is the last
_ALL_ORDERS_UP_TO = 4  # micro-batches

Indices = NDArray[np.intp]
Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A schedule of ``wlb.schedules``, its pipeline ranks, and the stages that each of them holds."""

    schedule: str
    pp: int
    virtual_pp: int = 1

    @property
    def stages(self) -> int:
        return self.pp * self.virtual_pp

    @property
    def schedule_run(self) -> str:
        """Interleaved 1F1B of one stage a rank is run as 1F1B."""
        return "1f1b" if self.schedule == "interleaved_1f1b" and self.virtual_pp == 1 else self.schedule


def in_fastest_order(ranks: Sequence[Sequence[MicroBatch]], pipeline: PipelineShape) -> list[list[MicroBatch]]:
    """``ranks``, of equally many micro-batches, each in the order in which the pipeline is fastest, as far as tried.

    No rank is slower than as given, rising, falling, or rising and then falling, up to 0.1%.
    """
    workloads = np.array([[micro_batch.workload for micro_batch in rank] for rank in ranks], dtype=np.float64)
    if pipeline.pp == 1 or np.all(workloads.max(axis=1) - workloads.min(axis=1) <= _EVEN * workloads.max(axis=1)):
        return [list(rank) for rank in ranks]
    orders, seconds = _best_rule(workloads, pipeline)
    for _ in range(_ROUNDS):
        slowest = int(seconds.argmax())
        order, taken = _best_of_round(workloads[slowest], orders[slowest], pipeline)
        if taken >= (1 - _GAIN) * seconds[slowest]:
            break
        orders[slowest], seconds[slowest] = order, taken
    return [[rank[index] for index in order] for rank, order in zip(ranks, orders.tolist(), strict=True)]


def _best_rule(workloads: Seconds, pipeline: PipelineShape) -> tuple[Indices, Seconds]:
    """Orders (ranks, micro-batches), the first of the best for each rank, and their makespans (ranks,)."""
    ranks, micro_batches = workloads.shape
    as_given = np.broadcast_to(np.arange(micro_batches), workloads.shape)
    falling = _falling(workloads)
    rising = falling[:, ::-1]
    rising_then_falling = np.concatenate([rising[:, ::2], falling[:, micro_batches % 2 :: 2]], axis=1)
    orders = np.stack([as_given, rising_then_falling, falling, rising], axis=1)
    makespans = _makespans(np.take_along_axis(workloads[:, None], orders, axis=2), pipeline)
    best = makespans.argmin(axis=1)
    rows = np.arange(ranks)
    return orders[rows, best], makespans[rows, best]


def _best_of_round(workloads: Seconds, order: Indices, pipeline: PipelineShape) -> tuple[Indices, float]:
    """The best order near ``order`` or with a peak, and its makespan; ``workloads`` has shape (micro-batches,)."""
    count = len(workloads)
    most = max(2, _ROUND_OPERATIONS // (2 * pipeline.stages * count))
    peaks = _falling(workloads)[_peaks(count, most // 2)]
    orders = np.concatenate([peaks, order[_swaps(count, most - len(peaks))]])
    makespans = _makespans(workloads[orders], pipeline)
    best = int(makespans.argmin())
    return orders[best], float(makespans[best])


def _makespans(workloads: Seconds, pipeline: PipelineShape) -> Seconds:
    """Shape (...) from (..., micro-batches), in units of a third of a stage's share of the workload."""
    shape = (*workloads.shape[:-1], pipeline.stages, workloads.shape[-1])
    forward = np.broadcast_to(workloads[..., None, :], shape)
    return pipeline_makespans(pipeline.schedule_run, forward, 2 * forward, pipeline.virtual_pp)


def _falling(workloads: Seconds) -> Indices:
    return np.argsort(-workloads, axis=-1, kind="stable")


@lru_cache(maxsize=16)
def _peaks(count: int, most: int) -> Indices:
    """At most ``most`` orders, as places in the falling order: all there are, or with the peak evenly spread."""
    if count <= _ALL_ORDERS_UP_TO:
        return np.array(list(permutations(range(count)))[:most])
    places = np.unique(np.linspace(-0.25, count - 0.75, min(2 * count, most)))
    return np.array([_peak_at(place, count) for place in places.tolist()])


def _peak_at(place: float, count: int) -> Indices:
    """The heavier, the closer to ``place``."""
    by_distance = sorted(range(count), key=lambda index: abs(index - place))
    order = np.empty(count, dtype=np.intp)
    order[by_distance] = np.arange(count)
    return order


@lru_cache(maxsize=16)
def _swaps(count: int, most: int) -> Indices:
    """At most ``most`` orders of ``count`` in which two have changed places, neighbours before distant ones."""
    pairs = sorted(combinations(range(count), 2), key=lambda pair: pair[1] - pair[0])[:most]
    orders = np.tile(np.arange(count), (len(pairs), 1))
    for row, (first, second) in zip(orders, pairs, strict=True):
        row[first], row[second] = second, first
    return orders
