"""Steps of a simulated job, in seconds.

The micro-batches of plans are sharded and priced (``wlb.sharding``): from the computing of each rank to the seconds of
its context-parallel group (``wlb.sharding.latency``), to the seconds of each stage in each micro-batch, to the pipeline
(``wlb.schedules.timing``), with the collectives of FSDP (``costs``). A step ends when its slowest pipeline has reduced
its gradients and updated its weights. Every cause of waiting can be left out, to find how much it adds
(``StepSeconds.where``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from wlb.packing.plan import StepPlan
from wlb.schedules.operations import HEAD, WEIGHT, RankOperations
from wlb.schedules.timing import PipelineTimes, pipeline_times, planned_times
from wlb.sharding.latency import Phases, Priced, computing_seconds, over_stages
from wlb.sharding.pieces import Shards
from wlb.simulate.costs import JobCosts

Array = NDArray[np.float64]

CAUSES = {
    "compute": "the mean GPU's forward and backward: what balancing cannot remove",
    "recomputation": "forward again, for activation checkpointing",
    "bubbles": "filling and draining a perfectly balanced pipeline",
    "stages": "stages that hold different amounts of the model",
    "micro-batches": "uneven micro-batches of a pipeline",
    "dp ranks": "waiting for the slowest data-parallel rank",
    "cp ranks": "waiting for the slowest context-parallel rank, layer by layer",
    "tp collectives": "gathering and reducing activations over tensor-parallel ranks",
    "expert exchange": "sending tokens to the ranks of their experts and back",
    "cp exchange": "K/V traffic that computing does not hide, and copies",
    "stage transfers": "sending activations between pipeline ranks",
    "weight gathers": "FSDP gathers that computing does not hide",
    "gradient reduction": "FSDP reductions that computing does not hide",
    "optimizer": "clipping and AdamW",
}
EVERYTHING = frozenset(CAUSES)


@dataclass(frozen=True)
class StepSeconds(ABC):
    """Seconds of steps when only the ``modelled`` of ``CAUSES`` are taken into account."""

    costs: JobCosts
    modelled: frozenset[str] = field(default=EVERYTHING, kw_only=True)
    in_turn: ClassVar[Sequence[str]] = tuple(CAUSES)  # the order in which ``where`` adds causes

    @property
    @abstractmethod
    def ends(self) -> Array:
        """When ranks have finished all their micro-batches; shape (pp, steps, dp)."""

    @property
    def weights(self) -> Array:
        """The part of ``stages.backward`` that computes gradients of weights; 0 if a backward is one operation."""
        return np.zeros((1, 1, 1, 1))

    @property
    @abstractmethod
    def stages(self) -> Phases:
        """Seconds of stages in micro-batches; shape (steps, dp, stages, micro-batches)."""

    @cached_property
    def seconds(self) -> Array:
        """Seconds of the steps; shape (steps,)."""
        of_rank = self.ends.max(axis=2) if "dp ranks" in self.modelled else self.ends.mean(axis=2)
        if "gradient reduction" in self.modelled:
            of_rank = of_rank + self.costs.late_reduction(self.stages.backward)
        if "optimizer" in self.modelled:
            of_rank = of_rank + self.costs.optimizer[:, None]
        return np.asarray(of_rank.max(axis=0))

    @cached_property
    def where(self) -> dict[str, Array]:
        """The part of ``seconds`` that each of ``CAUSES`` adds, shape (steps,) each."""
        causes = [frozenset(self.in_turn[:count]) for count in range(1, len(CAUSES) + 1)]
        seconds = [replace(self, modelled=modelled).seconds for modelled in causes]
        where = dict(zip(self.in_turn, np.diff(seconds, axis=0, prepend=0.0), strict=True))
        return {cause: where[cause] for cause in CAUSES}


@dataclass(frozen=True)
class Steps(StepSeconds):
    """Steps when only the ``modelled`` of ``CAUSES`` are taken into account; everything else is ideal.

    Values are computed on demand: ``seconds`` alone costs a fraction of ``where``. ``blocks`` and ``head`` are the
    computing of each rank outside attention in each micro-batch, in all blocks and in the output head; shape (steps,
    dp, micro-batches, cp). ``operations`` are the lists of the pipelines of each step, if they are planned.
    """

    shards: Shards
    blocks: Phases
    head: Phases
    operations: tuple[tuple[RankOperations, ...], ...] = ()

    @classmethod
    def of_plans(cls, plans: Sequence[StepPlan], costs: JobCosts) -> Self:
        """Steps of ``plans`` that are already dealt to data-parallel ranks, in which groups run in lock step."""
        micro_batches = [micro_batch for plan in plans for micro_batch in plan.micro_batches]
        shape = len(plans), costs.layout.pools, costs.job.rank_micro_batches
        shards = costs.job.sharded(micro_batches).reshaped(*shape)
        operations = tuple(plan.operations for plan in plans if plan.operations)
        return replace(cls.of_shards(shards, costs), operations=operations)

    @classmethod
    def of_shards(cls, shards: Shards, costs: JobCosts) -> Self:
        """Steps of micro-batches that are already sharded, in the shape (steps, dp, micro-batches)."""
        return cls(costs, shards, *computing_seconds(shards, costs.rank))

    @property
    def computing(self) -> Phases:
        """Computing seconds of each rank, without waiting and dealt heads; (steps, dp, stages, micro-batches, cp)."""
        shards, (forward, backward) = self.shards, self.blocks
        blocks = Phases(shards.attention_forward + forward, shards.attention_backward + backward)
        return Phases(*map(self._over_stages, blocks, self.head))

    @cached_property
    def priced(self) -> Priced:
        """Seconds of context-parallel groups; shape (steps, dp, micro-batches)."""
        computing = self.blocks, self.head
        return Priced.of(self.shards, self.costs.rank, computing, self.modelled, self._together)

    @cached_property
    def stages(self) -> Phases:
        stages, layout = Phases(*map(self._over_stages, *self.priced)), self.costs.layout
        return Phases(*(self._in_lock_step(seconds, layout.ep_ranks // layout.pool_size) for seconds in stages))

    @property
    def heads(self) -> Array:
        """Seconds of dealt heads, forward and backward, outside ``stages``; shape (steps, dp, micro-batches)."""
        seconds = self.priced.head.both
        if not self.costs.layout.deals_head or "stages" not in self.modelled:
            return np.zeros(seconds.shape)
        return seconds if "micro-batches" in self.modelled else _mean_of_step(seconds)

    @property
    def weights(self) -> Array:
        split = self.operations and self.costs.job.splits_backward
        return self._of_weights(self.costs.rank.weight_seconds) if split else super().weights

    @cached_property
    def where(self) -> dict[str, Array]:
        where, saved = super().where, self._saved_by_products.mean(axis=(1, 2))  # computing, and no idle time of stages
        return where | {"compute": where["compute"] - saved, "bubbles": where["bubbles"] + saved}

    @cached_property
    def _saved_by_products(self) -> Array:
        """Seconds of computing that weight parts save in the products of others; shape (steps, pp, dp)."""
        (steps, dp, *_), pp = self.stages.backward.shape, self.costs.layout.pp
        if not self.operations or not self.costs.job.splits_backward:
            return np.zeros((steps, pp, dp))
        times, weights = self.pipelines, np.broadcast_to(self.weights, self.stages.backward.shape)
        rows = np.flatnonzero([one.kind == WEIGHT for one in times.operations])
        stage, micro_batch = np.array([times.operations[row][:2] for row in rows]).T
        saved = weights[:, :, stage, micro_batch] - np.moveaxis(times.seconds[rows], 0, -1)
        of_ranks = [np.isin(stage, np.arange(self.costs.layout.stages)[mine]) for mine in self.costs.layout.rank_stages]
        return np.stack([saved[:, :, mine].sum(axis=2) for mine in of_ranks], axis=1)

    def _of_weights(self, price: Callable[..., Array]) -> Array:
        blocks, head = (self._together(price(self.shards.tokens, part)) for part in ("blocks", "head"))
        return self._over_stages(blocks, head)

    @property
    def moving(self) -> Array:
        """Seconds of K/V traffic of stages in a forward or backward; the shape of ``stages``."""
        if "cp exchange" not in self.modelled:
            return np.zeros(1)
        exchange = self._together(self.costs.rank.exchange_seconds(self.shards.waits_for, self.shards.tokens.shape[-1]))
        share = self.costs.job.stage_shares[:, None]
        return np.asarray(share * exchange[:, :, None])

    @property
    def pipelines(self) -> PipelineTimes:
        layout = self.costs.layout
        forward, backward = self.stages
        if "weight gathers" in self.modelled:
            forward, backward = self.costs.with_gathers(forward, backward, moving=self.moving)
        if not layout.keeps_weights:  # but gathered in every micro-batch, so all ranks wait for each other
            forward, backward = (self._in_lock_step(seconds, layout.pools) for seconds in (forward, backward))
        sent = layout.pp > 1 and "stage transfers" in self.modelled
        transfer = self.costs.job.transfer_seconds(self.shards.tokens.max(axis=3)) if sent else 0.0
        if self.operations:
            joined = self._of_weights(self.costs.rank.joined_seconds)
            return planned_times(self.operations, forward, backward, self.weights, joined, self.heads, transfer)
        named = layout.operations(forward.shape[-1])
        return pipeline_times(named, forward, backward, head=self.heads, transfer=transfer)

    @property
    def ends(self) -> Array:
        if "bubbles" in self.modelled:
            return self.pipelines.rank_ends
        # Of one pipeline; all are the same.
        busy = self.stages.both[:, 0].sum(axis=(1, 2)) + self.heads[:, 0].sum(axis=1)
        return np.asarray(busy[None, :, None] / self.costs.layout.pp)

    @property
    def imbalance(self) -> dict[str, Array]:
        """Largest over mean computing of all GPUs, and of each kind of them; shape (steps,).

        Context-parallel ranks are compared in each micro-batch, data-parallel and pipeline ranks over a step. Only
        ``gpus`` and ``pp`` leave out the computing that joined weight gradients save.
        """
        groups, taken = self.micro_batch_seconds, self.stages.both.sum(axis=2) + self.heads
        return {
            "gpus": slowest_over_mean(self.gpu_seconds, (1, 2, 3)),
            "cp": groups.max(axis=3).sum(axis=(1, 2)) / groups.mean(axis=3).sum(axis=(1, 2)),
            "micro_batches": slowest_over_mean(taken, (1, 2)),
            "dp": slowest_over_mean(groups.sum(axis=(2, 3)), (1,)),
            "pp": slowest_over_mean(self.gpu_seconds.sum(axis=(2, 3)), (1,)),
        }

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens of the steps; shape (steps,)."""
        return np.asarray(self.shards.tokens.sum(axis=(1, 2, 3)))

    @cached_property
    def gpu_seconds(self) -> Array:
        """Computing seconds of each GPU, without collectives and waiting; shape (steps, pp, dp, cp).

        All tensor-parallel ranks are the same.
        """
        of_stage = self._computed.sum(axis=3)
        of_rank = np.stack([of_stage[:, :, mine].sum(axis=2) for mine in self.costs.layout.rank_stages], axis=1)
        return of_rank - self._saved_by_products[..., None]

    @property
    def micro_batch_seconds(self) -> Array:
        """Computing seconds of each context-parallel rank in each micro-batch; shape (steps, dp, micro-batches, cp)."""
        return np.asarray(self._computed.sum(axis=2))

    @cached_property
    def _computed(self) -> Array:
        forward, backward = self.computing
        computed = forward + backward
        if self.costs.layout.deals_head and "stages" in self.modelled:
            places = np.arange(computed.shape[2]) == self.head_stages[..., None]  # (steps, dp, micro-batches, stages)
            computed += np.moveaxis(places, -1, 2)[..., None] * self.head.both[:, :, None]
        return computed

    def _together(self, ranks: Array) -> Array:
        """Seconds of groups from those of their ranks (the last axis)."""
        return np.asarray(ranks.max(axis=-1) if "cp ranks" in self.modelled else ranks.mean(axis=-1))

    def _in_lock_step(self, seconds: Array, pools: int) -> Array:
        """Seconds of the slowest of every ``pools`` pools, which meet in every layer; the shape of ``stages``."""
        pools = min(pools, seconds.shape[1])  # one stands for all, where all are alike
        if pools < 2 or "dp ranks" not in self.modelled:
            return seconds
        slowest = seconds.reshape(len(seconds), -1, pools, *seconds.shape[2:]).max(axis=2)
        return np.repeat(slowest, pools, axis=1)

    def _over_stages(self, blocks: Array, head: Array) -> Array:
        """Seconds of stages from those of the whole model, of groups or, with another axis, of their ranks."""
        job, inner = self.costs.job, head.ndim - 3
        if "micro-batches" not in self.modelled and not inner:
            blocks, head = map(_mean_of_step, (blocks, head))
        shares, head_shares = job.stage_shares, job.head_shares
        if "stages" not in self.modelled:
            shares = head_shares = np.full(len(shares), 1 / len(shares))
        return over_stages(blocks, head, shares, head_shares, inner)

    @cached_property
    def head_stages(self) -> NDArray[np.intp]:
        """The stage of the rank that runs the dealt head of each micro-batch; shape (steps, dp, micro-batches)."""
        found = np.zeros(self.shards.parts.shape, np.intp)
        for step, pipeline in np.ndindex(found.shape[:2]):
            planned = self.operations[step][pipeline] if self.operations else None
            for one in chain(*(planned or self.costs.layout.operations(self.shards.parts.shape[-1]))):
                if one.kind == HEAD:
                    found[step, pipeline, one.micro_batch] = one.stage
        return found


def slowest_over_mean(seconds: Array, axes: tuple[int, ...]) -> Array:
    """Maximum over mean along ``axes``."""
    return np.asarray(seconds.max(axis=axes) / seconds.mean(axis=axes))


def _mean_of_step(seconds: Array) -> Array:
    """Replace all micro-batches of a step by their mean; shape (steps, dp, micro-batches, ...)."""
    return np.broadcast_to(seconds.mean(axis=(1, 2), keepdims=True), seconds.shape)
