"""Seconds that the simulator predicts for a rank's share of each micro-batch, to hold measurements against.

Compute only, as in ``wlb.simulate.step.Steps.computing``: attention over the rank's pieces and everything else on its
tokens, on its part of the layers. The last stage also has the output head and the loss. The simulator shards
micro-batches to find what each rank holds; here the shard plans are there already.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wlb.job.config import PackingConfig
from wlb.job.job import JobSpec
from wlb.job.pricing import Pricing
from wlb.schedules.layout import Layout
from wlb.sharding.plan import ShardPlan, owners
from wlb.simulate.costs import Direction, JobCosts
from wlb.workload import ModelShape
from wlb.workload.hardware import hardware_preset


class PredictedLoad:
    """Prices micro-batches for the ranks that hold ``layers``, the ranges of all chunks of a pipeline rank.

    With the last layer come the head and the loss.
    """

    def __init__(self, shape: ModelShape, hardware: str, layers: Sequence[range], tp: int = 1) -> None:
        self._costs = JobCosts(
            JobSpec(shape, Pricing(hardware_preset(hardware)), PackingConfig(), layout=Layout(tp=tp))
        )
        self._share = sum(map(len, layers)) / shape.layers
        self._has_head = any(chunk.stop == shape.layers for chunk in layers)

    def seconds(self, shard_plans: Sequence[ShardPlan]) -> NDArray[np.float64]:
        """Forward and backward of each micro-batch on each context-parallel rank; shape (micro_batches, cp)."""
        both = (self._of_micro_batch(plan, "forward") + self._of_micro_batch(plan, "backward") for plan in shard_plans)
        return np.stack(list(both))

    def _of_micro_batch(self, plan: ShardPlan, direction: Direction) -> NDArray[np.float64]:
        costs, rank, tokens = self._costs, owners(plan.pieces), plan.tokens_per_rank
        _, start, stop = np.concatenate(plan.pieces).T
        last_keys = np.zeros(plan.cp_size, np.int64)
        np.maximum.at(last_keys, rank, stop)
        attention = np.bincount(rank, costs.attention(start, stop, direction), plan.cp_size)
        blocks = attention + costs.attention_drain(last_keys, direction) + costs.blocks(tokens, direction)
        return np.asarray(self._share * blocks + self._has_head * costs.head(tokens, direction))
