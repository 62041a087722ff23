"""Prices of a training stack, and of documents in level steps.

Packers of other steps price documents by W_a + W_l of an even group. The price of a micro-batch depends on how its
group shards it, so packed micro-batches are priced again (``Job.priced_as_run``) and arranged by that.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.sharding import LEVEL_SHARDING, price_shards
from wlb.sharding.latency import Priced
from wlb.workload import Costs, Hardware, ModelShape
from wlb.workload.base import Seconds

# Exposed share of tensor-parallel collectives that overlap with matrix products in parts. Fitted by studies'
# fit_prices.py to whole steps, so it includes what products lose beside collectives, and collectives that stay whole.
_SHOWN_OF_ASYNC_TP = 0.6


@dataclass(frozen=True)
class Software:
    """How a training stack handles weights, and its prices; the defaults are ours.

    With ``prefetch`` weights are gathered one block ahead. Weights that the layout does not keep are gathered for every
    backward, and kept for the next forward; their gradients are reduced in the last. With ``syncs_always``
    every forward gathers too, and every micro-batch reduces. With ``fetches_shards`` ranks fetch shards of weights from
    each other and send gradients back point to point (ODC, arXiv 2601.19362), instead of using a ring over all adapters
    of a node.

    Under expert parallelism computing hides all but ``exposed_exchange`` of the all-to-alls, by default nothing, and
    the busiest GPU has ``expert_imbalance`` times the tokens of the mean one (assumed). ``async_tp`` splits
    tensor-parallel collectives and matrix products into parts that overlap.
    """

    prefetch: bool = True
    syncs_always: bool = False
    fetches_shards: bool = False
    exposed_exchange: float = 1.0
    expert_imbalance: float = 1.1
    async_tp: bool = False

    def costs(self, shape: ModelShape, hardware: Hardware, tp: int, **settings: Any) -> Costs:
        """The ``Costs`` of this software for these arguments."""
        settings |= {name: getattr(self, name) for name in ("exposed_exchange", "expert_imbalance")}
        return Costs(shape, hardware, tp, **settings, exposed_tp=_SHOWN_OF_ASYNC_TP if self.async_tp else 1.0)


@dataclass(frozen=True)
class LevelPrices:
    """The ``StagePrices`` of a pipeline stage; a micro-batch of one rank holds up to ``max_tokens`` tokens."""

    costs: Costs
    max_tokens: int

    def document_seconds(self, lengths: ArrayLike) -> Seconds:
        tokens = np.asarray(lengths, np.int64)
        return self._attention(tokens) + self._rest[1] * tokens

    def beginning(self, lengths: NDArray[np.int64]) -> Seconds:
        return self._drain(lengths) + self._rest[0]

    @cached_property
    def least(self) -> float:
        return float(self.shared(np.array([1]), 1)[0])  # launching kernels, or reading weights

    def shared(self, lengths: NDArray[np.int64], ranks: int) -> Seconds:
        known = _shared_seconds(self.costs, ranks)
        if new := [length for length in dict.fromkeys(lengths.tolist()) if length not in known]:
            together = ranks * self.costs.ep_ranks
            shards = price_shards([[length] for length in new], together, LEVEL_SHARDING, self.costs)
            known.update(zip(new, Priced.of(shards, self.costs).whole.both.tolist(), strict=True))
        return np.array([known[length] for length in lengths.tolist()])

    @cached_property
    def _rest(self) -> tuple[float, float]:
        """Seconds of a one-rank micro-batch outside attention: a fixed part, and a part per token."""
        lengths = np.array([max(1, self.max_tokens // 2), max(2, self.max_tokens)])
        rest = self.shared(lengths, 1) - self._attention(lengths) - self._drain(lengths)
        token = max(0.0, float(rest[1] - rest[0]) / int(lengths[1] - lengths[0]))  # 0 if launching takes longer
        return max(0.0, float(rest[1]) - token * int(lengths[1])), token

    def _attention(self, lengths: NDArray[np.int64]) -> Seconds:
        return self.costs.attention_seconds(lengths) / self.costs.ep_ranks

    def _drain(self, lengths: NDArray[np.int64]) -> Seconds:
        forwards = 2 if self.costs.recomputed == "full" else 1
        return forwards * self.costs.drain_seconds(lengths, "forward") + self.costs.drain_seconds(lengths, "backward")


@lru_cache(maxsize=256)
def _shared_seconds(costs: Costs, ranks: int) -> dict[int, float]:
    """Seconds of a document by its tokens; a step and its attempts at better groups ask for the same ones."""
    return {}
