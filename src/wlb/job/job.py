"""One description of a job before it runs, shared by trainer, simulator and report: model, devices, layout, packing.

A ``Job`` and the lengths of documents determine the steps (``wlb.job.planner``), their cost and their memory
(``wlb.job.memory.fit``). The trainer makes a job from its configuration and the device it finds, the simulator from a
configuration, a name or keywords (``wlb.simulate.job``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.errors import UserError
from wlb.job.config import DataConfig, JobConfig, PackingConfig, ShardingConfig, TrainingConfig, check_dealt, check_pool
from wlb.job.configured_shape import check_divisible, configured_shape, has_tied_embeddings
from wlb.job.prices import LevelPrices, Software, micro_batch_phases, sharded_prices
from wlb.packing.options import Pools
from wlb.packing.plan import StageRanks, StepPlan
from wlb.packing.registry import PACKERS
from wlb.packing.slices import TILE
from wlb.schedules.layout import Layout, split_layers
from wlb.schedules.operations import check_operations
from wlb.settings import MOST_MICRO_BATCHES, MOST_RANKS
from wlb.sharding import check_group_size
from wlb.workload import Costs, Hardware, ModelShape, hardware_preset, make_workload
from wlb.workload.base import Checkpointing, DocumentPrices, Seconds
from wlb.workload.fitted import FittedPrices
from wlb.workload.flops import LINEAR_BACKWARD_FACTOR
from wlb.workload.links import group_link
from wlb.workload.phases import DocumentPhases, PhasedPrices
from wlb.workload.profile import WorkloadProfile, read_profile

_MOST_OF_A_WINDOW = 64  # most micro-batches per context window, on average, so that each has some tokens
_MOST_OF_MEAN = 2  # tokens of a micro-batch over the mean: micro-batches of short documents have more
_FAST_TYPE = {"cpu": "float32", "cuda": "bfloat16"}
# Of a device or machine; the rest is for the driver, libraries, fragmentation and other processes.
USABLE_SHARE = 0.9
# Of a GPU, outside the allocator of PyTorch: 4.3 GB on each of 8 H100s after an all-to-all (NVIDIA/nccl#1685).
NCCL_BYTES = 4 * 2**30


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that a process may hold, and the origin of that limit."""

    number_of_bytes: float
    origin: str


def limit_of_gpu(memory_bytes: float) -> MemoryLimit:
    """The limit of a process with a GPU of ``memory_bytes`` to itself."""
    usable = max(0.0, USABLE_SHARE * memory_bytes - NCCL_BYTES)
    return MemoryLimit(usable, f"{USABLE_SHARE:.0%} of a GPU less {NCCL_BYTES >> 30} GiB for NCCL")


@dataclass(frozen=True)
class Job:
    """A job on the GPUs of ``layout``, or processes on CPUs.

    ``packing.micro_batches`` counts over all data-parallel ranks. ``data`` has the order of documents and the policy
    for overlong ones; its store is not opened. With balanced ``packing``, ``pool`` of the dp x cp ranks form a pool;
    ``with_pools`` returns the job whose context-parallel groups are these pools; ``own_cp`` is then the cp that was
    set. ``tied_embeddings`` and ``checkpoint_copy`` (of weights and moments, while a checkpoint is written) only affect
    memory. ``limit`` is the memory limit of a process, by default 90% of that of ``hardware``, less NCCL. ``phases``
    are costs of documents before the language model.

    ``hardware`` has the rates of the type that the job computes in. A measured ``profile`` replaces the terms that it
    measured, but not links. ``packed_by`` are prices of documents given by a caller, used for packing. ``speeds`` are
    those of the ranks in level steps, 1 for a rank that runs as priced; nothing else reads them.

    Raises ``UserError`` for a layout that cannot run.
    """

    shape: ModelShape
    hardware: Hardware
    packing: PackingConfig
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(store=Path("documents")))
    layout: Layout = field(default_factory=Layout)
    pool: int | Literal["auto"] = "auto"
    own_cp: int | None = None
    activation_checkpointing: Checkpointing = "none"
    compiled: bool = False
    tied_embeddings: bool = False
    checkpoint_copy: bool = False
    limit: MemoryLimit | None = None
    phases: DocumentPhases | None = None
    profile: WorkloadProfile | None = field(default=None, hash=False)  # it has a dict
    packed_by: DocumentPrices | None = None
    speeds: tuple[float, ...] | None = None
    software: Software = field(default_factory=Software)

    def __post_init__(self) -> None:
        layout, micro_batches = self.layout, self.packing.micro_batches
        check_group_size(min(layout.cp, MOST_RANKS) if self.levels_steps else layout.cp)
        split_layers(self.shape, layout)
        if self.pools_decided:  # before that, the number of micro-batches is unknown
            check_dealt(micro_batches, layout.dp)
            check_operations(layout.schedule, layout.pp, self.micro_batches_per_rank, layout.virtual_pp)
            if self.speeds is not None and self.levels_steps and len(self.speeds) != layout.cp:
                raise UserError(
                    f"there are {len(self.speeds)} speeds for {layout.cp} ranks in level steps; give one per rank"
                )
        _ = self.costs  # checks the profile, and that tp divides heads
        check_divisible(self.shape, layout.tp)

    @classmethod
    def from_config(
        cls,
        config: JobConfig,
        hardware: str | Hardware = "h100",
        *,
        vocab_size: int | None = None,
        limit: MemoryLimit | None = None,
    ) -> Self:
        """The job that ``config`` describes, on ``hardware``.

        ``vocab_size`` is that of the token store, if known. ``training.memory_gib`` is the memory limit if set, else
        ``limit``. Raises ``UserError`` for a ``training.profile`` that cannot be read or is of another model.
        """
        if config.training.memory_gib is not None:
            limit = MemoryLimit(config.training.memory_gib * 2**30, "training.memory_gib")
        rates = hardware_preset(hardware) if isinstance(hardware, str) else hardware
        profile = None if config.training.profile is None else read_profile(config.training.profile)
        return cls(
            shape=configured_shape(config.model, vocab_size),
            hardware=rates.computing_in(compute_type(config.training, rates.device_type)),
            profile=profile,
            packing=config.packing,
            sharding=config.sharding,
            data=config.data,
            layout=config.parallel.layout,
            pool=config.parallel.pool,
            activation_checkpointing=config.training.activation_checkpointing,
            compiled=config.training.compile,
            tied_embeddings=has_tied_embeddings(config.model),
            # On a GPU the copy is on the host.
            checkpoint_copy=rates.device_type == "cpu" and config.checkpoint.dir is not None,
            limit=limit,
        )

    @property
    def set_layout(self) -> Layout:
        """The layout as it was set; in ``layout``, cp is the size of pools and dp their number."""
        cp = self.own_cp or self.layout.cp
        return replace(self.layout, cp=cp, dp=self.layout.dp_cp // cp)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of groups as they were set, of pools, and micro-batches per pipeline, which level steps do not fix."""
        pool = {} if self.layout.cp == self.set_layout.cp else {"pool": self.layout.cp}
        counted = {} if self.levels_steps else {"micro_batches": self.micro_batches_per_rank}
        return self.set_layout.sizes | pool | counted

    @property
    def memory_limit(self) -> MemoryLimit:
        """The memory limit of one process of the job."""
        memory, on_gpu = self.hardware.memory_bytes, self.hardware.device_type == "cuda"
        return self.limit or (limit_of_gpu(memory) if on_gpu else MemoryLimit(USABLE_SHARE * memory, "a CPU"))

    @property
    def plans_operations(self) -> bool:
        """Whether the plan of a step has an operation list for every pipeline rank."""
        by_default = self.layout.schedule == "auto" and PACKERS[self.packing.method].plans_operations
        return self.layout.pp > 1 and (by_default or self.layout.schedule == "planned")

    @property
    def splits_backward(self) -> bool:
        """Whether planned lists run a backward in two parts.

        Not with activation checkpointing, whose second part would keep the recomputed activations, nor in compiled
        blocks, which compute both parts at once.
        """
        return self.activation_checkpointing == "none" and not self.compiled

    @cached_property
    def stage_blocks(self) -> NDArray[np.int64]:
        """The number of blocks of each stage; shape (stages,)."""
        return np.array([len(layers) for layers in split_layers(self.shape, self.layout)])

    @property
    def stage_shares(self) -> NDArray[np.float64]:
        """The share of all blocks on each stage; shape (stages,)."""
        return self.stage_blocks / self.shape.layers

    def transfer_seconds(self, tokens: ArrayLike) -> Seconds:
        """Seconds to send the residual stream of ``tokens`` tokens to a neighbouring pipeline rank, in one message."""
        layout, hardware = self.layout, self.hardware
        link = group_link(hardware, "point_to_point", layout.pp, layout.tp * layout.dp_cp)
        return link.seconds(np.asarray(tokens) * (self.shape.hidden * hardware.bytes_per_value / layout.tp))

    @property
    def context_window(self) -> int:
        return self.data.context_window

    @property
    def micro_batches_per_rank(self) -> int:
        return self.packing.micro_batches // self.layout.dp

    @property
    def max_tokens(self) -> int:
        """L_max, the most tokens of a micro-batch, once it is decided; the context window for fixed-length packing."""
        return self.packing.max_tokens(self.context_window, self.packing.micro_batches)

    @property
    def in_flight_length(self) -> int:
        """Tokens of the micro-batches that bound planned lists: a context window, or twice the mean micro-batch."""
        return min(self.max_tokens, max(self.context_window, self._most_of_mean))

    @property
    def sliced_length(self) -> int:
        """Most tokens of all micro-batches with slices of one document: the document, and other documents beside it."""
        return self.context_window + self._most_of_mean

    @property
    def _most_of_mean(self) -> int:
        return _MOST_OF_MEAN * -(-self.global_batch * self.context_window // self.packing.micro_batches)

    @property
    def levels_steps(self) -> bool:
        """Whether steps are level: every rank of a pool runs its own number of micro-batches."""
        return self.pools is not None and self.pools.grouping == "level"

    @property
    def slices_documents(self) -> bool:
        """Whether long documents go through the pipeline in slices."""
        return self.pools is not None and self.pools.grouping == "slices"

    @property
    def global_batch(self) -> int:
        """Number of context windows that a step trains."""
        return self.pools.global_batch if self.pools else self.packing.micro_batches * self.packing.micro_batch_windows

    @property
    def least_length_factor(self) -> float:
        """The least L_max, in context windows, that holds a document and an even share of a global batch.

        Slices need twice an even share, and room for one document in the micro-batches of a pipeline, in whole tiles.
        A document without room, because others do not fill their micro-batches, is trained in the next step. That never
        happens if L_max is a window more than an even share.
        """
        share = self.global_batch / self.packing.micro_batches
        if self.slices_documents:
            document = 1 / self.micro_batches_per_rank + TILE / self.context_window
            return max(share, min(1.0, max(_MOST_OF_MEAN * share, document)))
        held_by = self.layout.cp / MOST_RANKS if self.levels_steps else 1.0  # MOST_RANKS may share a document
        return max(1.0, held_by, share)

    @property
    def most_step_tokens(self) -> int | None:
        """Most tokens that a step trains; None if unbounded."""
        return (self.pools.global_batch + 1) * self.context_window if self.pools else None

    @cached_property
    def costs(self) -> Costs:
        """The prices of one GPU, for sharding, planning and simulation."""
        settings = {"recomputed": self.activation_checkpointing, "profile": self.profile}
        return self.software.costs(self.shape, self.hardware, self.layout.tp, **settings)

    @property
    def workload(self) -> Costs:
        """The prices of a context-parallel group that shares everything evenly: W_a and W_l."""
        return replace(self.costs, cp=self.layout.cp)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of a pipeline stage on a node."""
        return max(1, self.hardware.node_size // self.layout.tp)

    @property
    def work_prices(self) -> DocumentPrices:
        """The work of training a document, independent of system and layout: W_a + W_l of a single GPU.

        From the profile if there is one.
        """
        return self._phased(make_workload(self.shape, self.hardware, profile=self.profile))

    @property
    def packing_prices(self) -> DocumentPrices:
        """The prices for packing: W_a + W_l or, if the packer asks for it, with the real cost of sharding."""
        cp, prices = self.layout.cp, self.packed_by
        if prices is None and self.levels_steps:
            prices = LevelPrices(self.costs, -(-self.max_tokens // cp))
        elif prices is None and PACKERS[self.packing.method].prices_sharding:
            prices = sharded_prices(self.costs, cp, self.sharding.strategy, self.context_window)
        return self._phased(prices or self.workload)

    @property
    def stage_ranks(self) -> StageRanks:
        """The ranks of a pipeline stage, for packing."""
        cp, per_node = self.layout.cp, self.ranks_per_node
        # All ranks of a node, or a divisor of node and stage: 4 if a node has 8 ranks and the stage 12.
        return StageRanks(cp, cp if cp <= per_node else gcd(cp, per_node), self.layout.dp, self.speeds)

    def _phased(self, prices: DocumentPrices) -> DocumentPrices:
        return prices if self.phases is None else PhasedPrices(prices, self.phases)

    def priced_as_run(self, plan: StepPlan) -> StepPlan:
        """``plan`` with the seconds of its micro-batches, by which they are dealt to ranks and ordered.

        With ``packed_by`` the prices do not change.
        """
        if self.packed_by is not None:
            return plan
        micro_batches = plan.micro_batches
        forward, backward = micro_batch_phases(
            micro_batches, self.layout.cp, self.sharding.strategy, self.costs, self.ranks_per_node
        )
        if self.phases is not None:
            encoders = np.array([self.phases.of(one.segments).sum() for one in micro_batches])
            forward = forward + encoders / (1 + LINEAR_BACKWARD_FACTOR)
            backward = backward + encoders * LINEAR_BACKWARD_FACTOR / (1 + LINEAR_BACKWARD_FACTOR)
        if self.speeds is not None and self.levels_steps:
            slowest = np.array([min(self.speeds[rank] for rank in one.ranks) for one in micro_batches])
            forward, backward = forward / slowest, backward / slowest
        return with_seconds(plan, forward + backward, forward)

    @property
    def pools(self) -> Pools | None:
        """How the dp x cp ranks are grouped; None if the groups are dp and cp as given."""
        return self.packing.pools(self.pool)

    @property
    def pools_decided(self) -> bool:
        """Whether the context-parallel groups are the pools, with a number of micro-batches for each."""
        pools = self.pools
        if pools is None or (pools.grouping == "level" and pools.size == self.layout.cp):
            return True
        decided = pools.size, pools.micro_batches
        return pools.grouping != "auto" and decided == (self.layout.cp, self.micro_batches_per_rank)

    def with_pools(self, pools: Pools) -> Self:
        """The same job with ``pools`` as context-parallel groups; their size and micro-batches must be given.

        Raises ``UserError`` for pools that do not divide dp x cp, a pipeline that cannot run so many micro-batches, and
        level steps in a pipeline.
        """
        if pools.grouping == "level":
            return self._with_level_steps(pools)
        self.check_slices(pools)
        ranks, size, micro_batches = self.layout.dp_cp, pools.size, pools.micro_batches
        if size == "auto" or micro_batches == "auto":
            raise ValueError(f"{pools} are not decided")
        check_pool(ranks, size)
        if micro_batches < self.layout.pp:
            raise UserError(
                f"pool_micro_batches = {micro_batches} cannot fill the pp = {self.layout.pp} pipeline stages; raise it"
            )
        number = ranks // size
        most = min(MOST_MICRO_BATCHES, _MOST_OF_A_WINDOW * pools.global_batch)
        if number * micro_batches > most:
            lower = f"lower it to {most // number}"
            remedy = lower if most >= number else "raise parallel.pool or packing.global_batch"
            raise UserError(
                f"pool_micro_batches = {micro_batches} divides a global batch of {pools.global_batch} context windows "
                f"into {number * micro_batches} micro-batches, over {most}; {remedy}"
            )
        counts = {"micro_batches": number * micro_batches, "pool_micro_batches": micro_batches}
        job = self._with_groups(number, size, pools, **counts)
        factor = job.packing.max_length_factor
        if factor != "auto" and factor < job.least_length_factor:
            raise UserError(
                f"max_length_factor = {factor:g} leaves no room for a global batch of "
                f"{job.global_batch} context windows in {job.packing.micro_batches} micro-batches; give at least "
                f'{job.least_length_factor:g}, or "auto"'
            )
        return job

    def _with_groups(self, dp: int, cp: int, pools: Pools, **counts: int) -> Self:
        packing = self.packing.changed(global_batch=pools.global_batch, grouping=pools.grouping, **counts)
        layout, own_cp = replace(self.layout, dp=dp, cp=cp), self.own_cp or self.layout.cp
        return replace(self, layout=layout, own_cp=own_cp, pool=cp, packing=packing)

    def check_slices(self, pools: Pools) -> None:
        """Raise ``UserError`` if ``pools`` slice documents but no pipeline runs planned lists."""
        if pools.grouping == "slices" and (self.layout.pp == 1 or self.layout.schedule not in ("auto", "planned")):
            raise UserError(
                "grouping = 'slices' sends documents through a pipeline in slices, in planned operation lists; it "
                f"needs pp of at least 2 and schedule = 'planned', not pp = {self.layout.pp} and "
                f"{self.layout.schedule!r}"
            )

    def _with_level_steps(self, pools: Pools) -> Self:
        ranks = self.layout.dp_cp
        if pools.size not in ("auto", ranks):
            raise UserError(
                f"grouping = 'level' pools all dp x cp = {ranks} ranks, not pool = {pools.size}; leave pool out"
            )
        if self.layout.pp > 1:
            raise UserError(
                f"grouping = 'level' gives ranks different numbers of micro-batches, which the pp = {self.layout.pp} "
                'stages of a pipeline cannot run; give "slices" or "even"'
            )
        if not self.layout.keeps_weights:
            raise UserError("grouping = 'level' keeps gathered weights all step; leave weights = 'gathered' out")
        return self._with_groups(1, ranks, pools, micro_batches=pools.global_batch)

    def measured(self, prices: tuple[float, float, float] | None, speeds: tuple[float, ...] | None) -> Self:
        """The same job with the results of ``wlb.runtime.calibration``; without prices it keeps its own.

        ``prices`` are ``square``, ``token`` and ``fixed`` of ``FittedPrices``. A measured backward includes the
        recomputation of activation checkpointing, which ``Costs`` would add again, so it is taken out here.
        """
        if prices is None:
            return replace(self, speeds=speeds)
        again = 1 + 1 / (1 + LINEAR_BACKWARD_FACTOR)
        attention = again if self.activation_checkpointing == "full" else 1.0
        rest = 1.0 if self.activation_checkpointing == "none" else again
        fitted = FittedPrices(prices[0] / attention, prices[1] / rest, prices[2] / rest, r_squared=1.0)
        profile = fitted.profile(self.shape, machine="the job", versions={}, dtype="the job's", clock="wall")
        return replace(self, profile=profile, speeds=speeds)

    def with_length_factor(self, factor: float | Literal["auto"]) -> Self:
        """The same job with another L_max, in context windows, if the packer has one."""
        if not self.packing.reads("max_length_factor"):
            return self
        return replace(self, packing=self.packing.changed(max_length_factor=factor))


def with_seconds(plan: StepPlan, both: NDArray[np.float64], forward: NDArray[np.float64]) -> StepPlan:
    """``plan`` with these seconds of its micro-batches, in whole nanoseconds, so that machines agree."""
    seconds = zip(plan.micro_batches, both.tolist(), forward.tolist(), strict=True)
    priced = iter([replace(one, workload=round(total, 9), forward=round(first, 9)) for one, total, first in seconds])
    return replace(plan, ranks=tuple(tuple(next(priced) for _ in rank) for rank in plan.ranks))


def compute_type(training: TrainingConfig, device_type: str) -> str:
    """The type of forward and backward passes: ``training.dtype``, or the fast type of the device for "auto"."""
    return _FAST_TYPE[device_type] if training.dtype == "auto" else training.dtype
