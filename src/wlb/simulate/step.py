"""Steps of a simulated job, in seconds.

The micro-batches of some plans are sharded and priced (``wlb.sharding``). From what each rank computes follows what its
context-parallel group takes (``wlb.sharding.latency``), from groups what each stage takes in each micro-batch, from
those the pipeline (``wlb.schedules.timing``), with FSDP's collectives (``fsdp``). A step ends when its slowest
pipeline has reduced its gradients and updated its weights. Every cause of waiting can be left out, to find how much it
adds (``StepSeconds.where``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from wlb.packing.plan import StepPlan
from wlb.schedules.operations import RankOperations
from wlb.schedules.timing import PipelineTimes, pipeline_times, planned_times
from wlb.sharding import price_shards
from wlb.sharding.latency import Phases, Shards, group_phases
from wlb.simulate.costs import JobCosts
from wlb.simulate.fsdp import late_reduction, weights_kept, with_gathers

Array = NDArray[np.float64]

CAUSES = {
    "compute": "the mean GPU's forward and backward: what balancing cannot remove",
    "recomputation": "forward again, for activation checkpointing",
    "bubbles": "filling and draining a perfectly balanced pipeline",
    "stages": "stages that hold different amounts of the model",
    "micro-batches": "micro-batches of one pipeline that differ",
    "dp ranks": "waiting for the slowest data-parallel rank",
    "cp ranks": "waiting for the slowest context-parallel rank, layer by layer",
    "tp collectives": "gathering and reducing activations over tensor-parallel ranks",
    "expert exchange": "tokens under way to the ranks that have their experts, and back",
    "cp exchange": "keys and values under way that no computing hides, and their copies",
    "stage transfers": "activations under way between pipeline ranks",
    "weight gathers": "FSDP's weights under way that no computing hides",
    "gradient reduction": "FSDP's gradients under way that no computing hides",
    "optimizer": "clipping and AdamW",
}
EVERYTHING = frozenset(CAUSES)

IMBALANCES = {
    "gpus": "of all GPUs",
    "cp": "of the ranks of a context-parallel group in a micro-batch",
    "micro_batches": "of what groups take for a step's micro-batches",
    "dp": "of data-parallel ranks' sums over a step",
    "pp": "of pipeline ranks' sums over a step",
}


@dataclass(frozen=True)
class StepSeconds(ABC):
    """What steps take when only the ``modelled`` of ``CAUSES`` are taken into account."""

    costs: JobCosts
    modelled: frozenset[str] = field(default=EVERYTHING, kw_only=True)
    in_turn: ClassVar[Sequence[str]] = tuple(CAUSES)  # how causes are added to each other in ``where``

    @property
    @abstractmethod
    def ends(self) -> Array:
        """When ranks have run all of their micro-batches; shape (pp, steps, dp)."""

    @property
    def weights(self) -> Array | None:
        """The part of backwards that computes weights' gradients; None where a backward is one operation."""
        return None

    @property
    @abstractmethod
    def late_reduction(self) -> Array:
        """What reducing gradients adds after the last backward; (pp, steps)."""

    @cached_property
    def seconds(self) -> Array:
        """What the steps take; shape (steps,)."""
        of_rank = self.ends.max(axis=2) if "dp ranks" in self.modelled else self.ends.mean(axis=2)
        if "gradient reduction" in self.modelled:
            of_rank = of_rank + self.late_reduction
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
    """Some steps when only the ``modelled`` of ``CAUSES`` are taken into account; everything else is ideal.

    Nothing is priced before it is asked for: ``seconds`` alone costs a fraction of ``where``. ``blocks`` and ``head``
    are what each rank computes outside attention in each micro-batch, in all blocks and in the output head; shape
    (steps, dp, micro-batches, cp). ``operations`` are the lists of each step's pipelines, where they are planned.
    """

    shards: Shards
    blocks: Phases
    head: Phases
    operations: tuple[tuple[RankOperations, ...], ...] = ()

    @classmethod
    def of_plans(cls, plans: Sequence[StepPlan], costs: JobCosts) -> Steps:
        """Steps of ``plans``, dealt to the job's data-parallel ranks already, in which groups run in lock step."""
        micro_batches = [micro_batch for plan in plans for micro_batch in plan.micro_batches]
        shape = len(plans), costs.layout.dp, costs.job.micro_batches_per_rank
        shards = price_shards(
            [one.lengths for one in micro_batches],
            costs.layout.cp,
            costs.job.sharding.strategy,
            costs.rank,
            [one.earlier if one.is_slice else None for one in micro_batches],
        ).reshaped(*shape)
        operations = tuple(plan.operations for plan in plans if plan.operations)
        return replace(cls.of_shards(shards, costs), operations=operations)

    @classmethod
    def of_shards(cls, shards: Shards, costs: JobCosts) -> Steps:
        """The steps of micro-batches that are sharded and priced, in the shape (steps, dp, micro-batches)."""
        blocks, head = (Phases.of(p, shards.tokens) for p in (costs.rank.blocks_seconds, costs.rank.head_seconds))
        return cls(costs, shards, blocks, head)

    @property
    def computing(self) -> Phases:
        """What each rank computes, without waiting; shape (steps, dp, stages, micro-batches, cp)."""
        shards, (forward, backward) = self.shards, self.blocks
        blocks = Phases(shards.attention_forward + forward, shards.attention_backward + backward)
        return self._over_stages(blocks, self.head)

    @property
    def groups(self) -> Phases:
        """What context-parallel groups take for all blocks; shape (steps, dp, micro-batches)."""
        return group_phases(self.shards, self.blocks, self.costs.rank, self.modelled, self._together)

    @cached_property
    def stages(self) -> Phases:
        """What stages take in micro-batches; shape (steps, dp, stages, micro-batches)."""
        groups, head = self.groups, Phases(*map(self._together, self.head))
        if "micro-batches" not in self.modelled:
            groups, head = (Phases(*map(_mean_of_step, seconds)) for seconds in (groups, head))
        return self._over_stages(groups, head)

    @property
    def weights(self) -> Array | None:
        """Of ``stages.backward``."""
        if not self.operations or not self.costs.job.splits_backward:
            return None
        rank, tokens = self.costs.rank, self.shards.tokens
        blocks, head = (self._together(rank.weight_seconds(tokens, part)) for part in ("blocks", "head"))
        if "micro-batches" not in self.modelled:
            blocks, head = map(_mean_of_step, (blocks, head))
        return self._over_stages(Phases(blocks, blocks), Phases(head, head)).backward

    @property
    def moving(self) -> Array:
        """For how long stages have keys and values under way, in a forward or backward; shaped as ``stages`` are."""
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
            forward, backward = with_gathers(self.costs, forward, backward, moving=self.moving)
        if not weights_kept(self.costs) and "dp ranks" in self.modelled:
            # FSDP gathers weights in every micro-batch, so data-parallel ranks wait for each other.
            shape, slowest = forward.shape, (seconds.max(axis=1, keepdims=True) for seconds in (forward, backward))
            forward, backward = (np.broadcast_to(seconds, shape) for seconds in slowest)
        sent = layout.pp > 1 and "stage transfers" in self.modelled
        transfer = self.costs.job.transfer_seconds(self.shards.tokens.max(axis=3)) if sent else 0.0
        if self.operations:
            return planned_times(self.operations, forward, backward, self.weights, transfer)
        return pipeline_times(layout.operations(forward.shape[-1]), forward, backward, transfer=transfer)

    @property
    def late_reduction(self) -> Array:
        return late_reduction(self.costs, self.stages.backward)

    @property
    def ends(self) -> Array:
        if "bubbles" in self.modelled:
            return self.pipelines.rank_ends
        busy = self.stages.both[:, 0]  # of one pipeline, as all are alike
        return np.asarray(busy.sum(axis=(1, 2))[None, :, None] / self.costs.layout.pp)

    @property
    def balanced_seconds(self) -> Array:
        """What the steps would take if all micro-batches of a step were alike; shape (steps,)."""
        return replace(self, modelled=self.modelled - {"micro-batches"}).seconds

    @property
    def imbalance(self) -> dict[str, Array]:
        """The slowest over the mean of what is computed, shape (steps,), for each of ``IMBALANCES``."""
        groups, taken = self.micro_batch_seconds, self.stages.both.sum(axis=2)
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
        """What each GPU computes in the steps, collectives and waiting left out; shape (steps, pp, dp, cp).

        Tensor-parallel ranks are alike.
        """
        of_stage = self._computed.sum(axis=3)
        return np.stack([of_stage[:, :, mine].sum(axis=2) for mine in self.costs.layout.rank_stages], axis=1)

    @property
    def micro_batch_seconds(self) -> Array:
        """The same for each context-parallel rank of each micro-batch; shape (steps, dp, micro-batches, cp)."""
        return np.asarray(self._computed.sum(axis=2))

    @cached_property
    def _computed(self) -> Array:
        forward, backward = self.computing
        return forward + backward

    def _together(self, ranks: Array) -> Array:
        """Seconds of groups from those of their ranks, the last axis."""
        return np.asarray(ranks.max(axis=-1) if "cp ranks" in self.modelled else ranks.mean(axis=-1))

    def _over_stages(self, blocks: Phases, head: Phases) -> Phases:
        """Seconds of stages from those of whole models; the axis of stages comes before that of micro-batches."""
        stages = self.costs.layout.stages
        share, head_share = self.costs.job.stage_shares, np.eye(stages)[-1]
        if "stages" not in self.modelled:
            share = head_share = np.full(stages, 1 / stages)
        share, head_share = (of_stage.reshape(-1, *[1] * (head.forward.ndim - 2)) for of_stage in (share, head_share))
        return Phases(*(share * b[:, :, None] + head_share * h[:, :, None] for b, h in zip(blocks, head, strict=True)))


def slowest_over_mean(seconds: Array, axes: tuple[int, ...]) -> Array:
    """The most over the mean along ``axes``."""
    return np.asarray(seconds.max(axis=axes) / seconds.mean(axis=axes))


def _mean_of_step(seconds: Array) -> Array:
    """The mean micro-batch of each step in place of all; shape (steps, dp, micro-batches, ...)."""
    return np.broadcast_to(seconds.mean(axis=(1, 2), keepdims=True), seconds.shape)
