"""Prices of the documents and micro-batches of a job, all from the one price in ``wlb.sharding.latency``.

A packer needs prices that add up over documents, but the cost of a document depends on how the context-parallel group
shards it. Under balanced sharding a short document stays whole on one rank and exchanges nothing, while a long one is
cut; between distant ranks, its keys and values may take longer than the attention that hides them. So documents are
probed: micro-batches with one document each, among short ones, are sharded and priced. What the document adds, over
W_a + W_l, is the correction for its length. Corrections are interpolated between probes.

In large groups, micro-batches that are even by these prices are not quite even, because one exchange hides behind the
attention of several documents. So packed micro-batches are priced again (``micro_batch_phases``) and arranged by that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.packing.plan import MicroBatch
from wlb.sharding import LEVEL_SHARDING, price_shards
from wlb.sharding.latency import Phases, group_seconds
from wlb.workload import Costs, Hardware, ModelShape
from wlb.workload.base import DocumentPrices, Seconds

_PROBES = np.arange(2, 17) / 16  # lengths of probed documents, in context windows
_SHORT = 64  # short documents fill a window
_AMONG = (0.5, 0.75, 1.0, 1.25)  # windows of short documents beside the probed one; the mean evens out rounding
_ALONE = 0.5  # windows of only short documents, and three times as many
_DECIMALS = 4  # of corrections, so that rounding on different CPUs does not change plans
# Bounds of corrections. Short documents that stay whole in a group of 64 ranks cost 0.07 of W_a + W_l, which includes
# an exchange. Outside these bounds, the window is too short to be probed.
_LEAST, _MOST = 0.05, 4.0


@dataclass(frozen=True)
class Software:
    """How a training stack handles weights, and its prices; the defaults are ours.

    With ``prefetch`` weights are gathered one block ahead. Weights that the layout does not keep are gathered for every
    backward, and kept for the next forward; their gradients are reduced in the last. With ``syncs_always``
    every forward gathers too, and every micro-batch reduces. With ``fetches_shards`` ranks fetch shards of weights from
    each other and send gradients back point to point (ODC, arXiv 2601.19362), instead of using a ring over all adapters
    of a node.
    """

    prefetch: bool = True
    syncs_always: bool = False
    fetches_shards: bool = False

    def costs(self, shape: ModelShape, hardware: Hardware, tp: int, **settings: Any) -> Costs:
        """The ``Costs`` of this software for these arguments."""
        return Costs(shape, hardware, tp, **settings)


@dataclass(frozen=True)
class ShardedPrices:
    """Prices of documents with a ``corrections`` factor by length; ``lengths`` are ascending tokens."""

    evenly: Costs
    lengths: NDArray[np.float64]
    corrections: NDArray[np.float64]

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        """Seconds that each document adds, forward and backward; shape of ``lengths`` (tokens)."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.evenly.document_seconds(tokens) * np.interp(tokens, self.lengths, self.corrections)


@lru_cache(maxsize=64)
def sharded_prices(costs: Costs, cp: int, strategy: str, context_window: int) -> DocumentPrices:
    """Prices of documents of up to ``context_window`` tokens in groups of ``cp`` ranks that shard by ``strategy``."""
    evenly = replace(costs, cp=cp)
    if cp == 1:
        return evenly
    short = max(1, context_window // _SHORT)
    probes = np.unique((_PROBES * context_window).astype(np.int64).clip(1))
    few, *among = [max(1, round(windows * context_window / short)) for windows in (_ALONE, *_AMONG)]
    many = 3 * few
    micro_batches = [[short] * few, [short] * many]
    micro_batches += [[probe, *[short] * count] for probe in probes.tolist() for count in among]
    seconds = group_seconds(price_shards(micro_batches, cp, strategy, costs), costs).both
    each = (seconds[1] - seconds[0]) / (many - few)  # of a short document
    fixed = seconds[0] - few * each  # of every micro-batch
    added = seconds[2:].reshape(len(probes), -1) - fixed - each * np.array(among)
    ratios = [each / float(evenly.document_seconds(short)), *(added.mean(axis=1) / evenly.document_seconds(probes))]
    corrections = np.clip(np.round(ratios, _DECIMALS), _LEAST, _MOST)
    return ShardedPrices(evenly, np.array([short, *probes], np.float64), corrections)


@dataclass(frozen=True)
class LevelPrices:
    """The ``StagePrices`` of a pipeline stage; a micro-batch of one rank holds up to ``max_tokens`` tokens."""

    costs: Costs
    max_tokens: int

    def alone(self, lengths: NDArray[np.int64]) -> Seconds:
        return self.costs.attention_seconds(lengths) + self._rest[1] * lengths

    def beginning(self, lengths: NDArray[np.int64]) -> Seconds:
        return self._drain(lengths) + self._rest[0]

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        return self.alone(np.asarray(lengths, np.int64))

    def shared(self, lengths: NDArray[np.int64], ranks: int) -> Seconds:
        known = _shared_seconds(self.costs, ranks)
        if new := [length for length in dict.fromkeys(lengths.tolist()) if length not in known]:
            shards = price_shards([[length] for length in new], ranks, LEVEL_SHARDING, self.costs)
            known.update(zip(new, group_seconds(shards, self.costs).both.tolist(), strict=True))
        return np.array([known[length] for length in lengths.tolist()])

    @cached_property
    def _rest(self) -> tuple[float, float]:
        """Seconds of a one-rank micro-batch outside attention: a fixed part, and a part per token."""
        lengths = np.array([max(1, self.max_tokens // 2), max(2, self.max_tokens)])
        rest = self.shared(lengths, 1) - self.costs.attention_seconds(lengths) - self._drain(lengths)
        token = float(rest[1] - rest[0]) / int(lengths[1] - lengths[0])
        return max(0.0, float(rest[1]) - token * int(lengths[1])), token

    def _drain(self, lengths: NDArray[np.int64]) -> Seconds:
        forwards = 2 if self.costs.recomputed == "full" else 1
        return forwards * self.costs.drain_seconds(lengths, "forward") + self.costs.drain_seconds(lengths, "backward")


@lru_cache(maxsize=256)
def _shared_seconds(costs: Costs, ranks: int) -> dict[int, float]:
    """Seconds of a document by its tokens; a step and its attempts at better groups ask for the same ones."""
    return {}


def micro_batch_phases(
    micro_batches: Sequence[MicroBatch], cp: int, strategy: str, costs: Costs, ranks_per_node: int
) -> Phases:
    """Seconds of the context-parallel groups of ``micro_batches``; shape (micro-batches,).

    A group is ``cp`` ranks that shard by ``strategy``, or the ranks that a micro-batch names; a node has
    ``ranks_per_node`` ranks.
    """
    kinds = np.array(
        [(len(one.ranks), nodes_of(one.ranks, ranks_per_node)) if one.ranks else (cp, 0) for one in micro_batches]
    )
    seconds = np.zeros((2, len(micro_batches)))
    for size, nodes in np.unique(kinds, axis=0).tolist():
        places = np.flatnonzero((kinds == (size, nodes)).all(axis=1))
        of_kind, sharded_by = (replace(costs, nodes=nodes), LEVEL_SHARDING) if nodes else (costs, strategy)
        shards = price_shards([micro_batches[place].lengths for place in places.tolist()], size, sharded_by, of_kind)
        seconds[:, places] = group_seconds(shards, of_kind)
    return Phases(*seconds)


def nodes_of(ranks: Iterable[int], ranks_per_node: int) -> int:
    """The number of nodes of these ranks of a pipeline stage."""
    return len({rank // ranks_per_node for rank in ranks})
