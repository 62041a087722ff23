"""One description of a job before it runs, shared by trainer, simulator and report: model, devices, layout, packing.

A ``Job`` and the lengths of documents determine the steps (``wlb.job.planner``), their cost and their memory
(``wlb.job.memory.fit``). The trainer makes a job from its configuration and the device it finds, the simulator from a
configuration, a name or keywords (``wlb.simulate.job``).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, gcd
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.errors import UserError
from wlb.job.config import DataConfig, JobConfig, PackingConfig, ShardingConfig, TrainingConfig
from wlb.job.configured_shape import check_divisible, configured_shape, has_tied_embeddings
from wlb.job.prices import LevelPrices, Software
from wlb.packing.options import Grouping
from wlb.packing.plan import MicroBatch, StageRanks, StepPlan
from wlb.schedules.layout import Layout, split_layers
from wlb.schedules.operations import check_operations
from wlb.settings import MOST_MICRO_BATCHES, MOST_RANKS
from wlb.sharding import LEVEL_SHARDING, check_group_size, price_shards
from wlb.sharding.latency import Priced
from wlb.sharding.pieces import Shards
from wlb.workload import Costs, Hardware, ModelShape, hardware_preset, make_workload
from wlb.workload.base import Checkpointing, DocumentPrices, Seconds
from wlb.workload.costs import QUERY_TILE
from wlb.workload.fitted import FittedPrices
from wlb.workload.flops import FORWARD_SHARE
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

    ``data`` has the order of documents and the policy for overlong ones; its store is not opened. What ``layout`` and
    ``packing`` leave open, ``wlb.simulate.decide`` decides. ``checkpoint_copy`` (of weights and moments, while a
    checkpoint is written) only affects memory. ``limit`` is the memory limit of a process, by default
    90% of that of ``hardware``, less NCCL. ``phases`` are costs of documents before the language model.

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
    activation_checkpointing: Checkpointing = "none"
    compiled: bool = False
    tied_embeddings: bool = False
    checkpoint_copy: bool = False
    limit: MemoryLimit | None = None
    phases: DocumentPhases | None = None
    profile: WorkloadProfile | None = field(default=None, hash=False)  # it has a dict
    packed_by: DocumentPrices | None = field(default=None, hash=False)  # a caller's may have no hash
    speeds: tuple[float, ...] | None = None
    software: Software = field(default_factory=Software)

    def __post_init__(self) -> None:
        layout = self.layout
        if not self.levels_steps:
            check_group_size(layout.pool_size, "cp" if layout.pool is None else "pool")
        split_layers(self.shape, layout)
        if self.levels_steps:
            self._check_level_steps()
        elif self.slices_documents and (layout.pp == 1 or layout.schedule not in ("auto", "planned")):
            raise UserError(
                "grouping = 'slices' sends documents through a pipeline in slices, in planned operation lists; it "
                f"needs pp of at least 2 and schedule = 'planned', not pp = {layout.pp} and {layout.schedule!r}"
            )
        if not self.packing.is_balanced:
            self.packing.check_dealt(layout.dp)
            if layout.pool not in (None, layout.cp):
                raise UserError(f"pool = {layout.pool} has no effect with method {self.packing.method!r}; leave it out")
        elif layout.dp_cp > MOST_RANKS * self.global_batch:
            raise UserError(
                f"dp x cp = {layout.dp_cp} ranks are over {MOST_RANKS} for each of the {self.global_batch} context "
                "windows that a step trains; lower them, or raise packing.global_batch"
            )
        self._check_expert_groups()
        if self.pools_decided:  # before that, the number of micro-batches is unknown
            self._check_pools()
            check_operations(layout.schedule, layout.pp, self.rank_micro_batches, layout.virtual_pp)
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
        ``limit``. Raises ``UserError`` for a ``training.profile`` that cannot be read or is of another model, and for a
        ``training.async_tp`` that would have no effect.
        """
        if config.training.memory_gib is not None:
            limit = MemoryLimit(config.training.memory_gib * 2**30, "training.memory_gib")
        rates = hardware_preset(hardware) if isinstance(hardware, str) else hardware
        if config.training.async_tp:
            _check_async_tp(config, rates)
        profile = None if config.training.profile is None else read_profile(config.training.profile)
        return cls(
            shape=configured_shape(config.model, vocab_size),
            hardware=rates.computing_in(compute_type(config.training, rates.device_type)),
            profile=profile,
            packing=config.packing,
            sharding=config.sharding,
            data=config.data,
            layout=config.parallel.layout,
            activation_checkpointing=config.training.activation_checkpointing,
            compiled=config.training.compile,
            software=Software(async_tp=config.training.async_tp),
            tied_embeddings=has_tied_embeddings(config.model),
            # On a GPU the copy is on the host.
            checkpoint_copy=rates.device_type == "cpu" and config.checkpoint.dir is not None,
            limit=limit,
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of groups, and micro-batches per pipeline, which level steps do not fix."""
        counted = {} if self.levels_steps else {"rank_micro_batches": self.rank_micro_batches}
        return self.layout.sizes | counted

    @property
    def memory_limit(self) -> MemoryLimit:
        """The memory limit of one process of the job."""
        memory, on_gpu = self.hardware.memory_bytes, self.hardware.device_type == "cuda"
        return self.limit or (limit_of_gpu(memory) if on_gpu else MemoryLimit(USABLE_SHARE * memory, "a CPU"))

    @property
    def plans_operations(self) -> bool:
        """Whether the plan of a step has an operation list for every pipeline rank."""
        by_default = self.layout.schedule == "auto" and self.packing.is_balanced
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

    @property
    def head_shares(self) -> NDArray[np.float64]:
        """The share of the output head on each stage: all on the last, or none if it is dealt; shape (stages,)."""
        shares: NDArray[np.float64] = np.eye(self.layout.stages)[-1] * (not self.layout.deals_head)
        return shares

    def transfer_seconds(self, tokens: ArrayLike) -> Seconds:
        """Seconds to send the residual stream of ``tokens`` tokens to a neighbouring pipeline rank, in one message."""
        layout, hardware = self.layout, self.hardware
        link = group_link(hardware, "point_to_point", layout.pp, layout.tp * layout.dp_cp)
        return link.seconds(np.asarray(tokens) * (self.shape.hidden * hardware.bytes_per_value / layout.tp))

    @property
    def context_window(self) -> int:
        return self.data.context_window

    @property
    def global_batch(self) -> int:
        """Number of context windows that a step trains."""
        return self.packing.global_batch

    @property
    def rank_micro_batches(self) -> int:
        """Micro-batches that each pool runs in a step; one per window in level steps, and where nothing is decided."""
        given, one = self.packing.rank_micro_batches, self.layout.pools * self.packing.micro_batch_windows
        return max(1, self.global_batch // one) if given == "auto" else given

    @property
    def step_micro_batches(self) -> int:
        """Micro-batches that all pools run in a step."""
        return self.layout.pools * self.rank_micro_batches

    @property
    def max_tokens(self) -> int:
        """L_max, the most tokens of a micro-batch, once it is decided; the context window for fixed-length packing."""
        return self.packing.max_tokens(self.context_window, self.step_micro_batches, self.global_batch)

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
        return _MOST_OF_MEAN * -(-self.global_batch * self.context_window // self.step_micro_batches)

    @property
    def levels_steps(self) -> bool:
        """Whether steps are level: every rank of a pool runs its own number of micro-batches."""
        return self.packing.grouping == "level"

    @property
    def slices_documents(self) -> bool:
        """Whether long documents go through the pipeline in slices."""
        return self.packing.grouping == "slices"

    @property
    def least_length_factor(self) -> float:
        """The least L_max, in context windows, that holds a document and an even share of a global batch.

        Slices need twice an even share, and room for one document in the micro-batches of a pipeline, in whole tiles.
        A document without room, because others do not fill their micro-batches, is trained in the next step. That never
        happens if L_max is a window more than an even share.
        """
        share = self.global_batch / self.step_micro_batches
        if self.slices_documents:
            document = 1 / self.rank_micro_batches + QUERY_TILE / self.context_window
            return max(share, min(1.0, max(_MOST_OF_MEAN * share, document)))
        most = MOST_RANKS // self.layout.ep_ranks * self.layout.ep_ranks  # ranks that may share a document
        held_by = self.layout.pool_size / most if self.levels_steps else 1.0
        return max(1.0, held_by, share)

    @property
    def most_step_tokens(self) -> int | None:
        """Most tokens that a step trains; None if unbounded."""
        return (self.global_batch + 1) * self.context_window if self.packing.is_balanced else None

    @cached_property
    def costs(self) -> Costs:
        """The prices of one GPU, for sharding, planning and simulation."""
        settings = {"recomputed": self.activation_checkpointing, "profile": self.profile, "ep": self.layout.ep}
        return self.software.costs(self.shape, self.hardware, self.layout.tp, **settings)

    @property
    def workload(self) -> Costs:
        """The prices of a pool that shares everything evenly: W_a and W_l."""
        return replace(self.costs, cp=self.layout.pool_size)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of a pipeline stage on a node."""
        return max(1, self.hardware.node_size // self.layout.tp)

    @property
    def work_prices(self) -> DocumentPrices:
        """The work of training a document, independent of system and layout: W_a + W_l of a single GPU."""
        return self._phased(make_workload(self.shape, self.hardware, profile=self.profile))

    @property
    def packing_prices(self) -> DocumentPrices:
        """The prices for packing: ``packed_by`` or W_a + W_l; in level steps, of documents on any number of ranks."""
        groups = max(1, self.layout.pool_size // self.layout.ep_ranks)
        level = LevelPrices(self.costs, -(-self.max_tokens // groups)) if self.levels_steps else None
        return self._phased(self.packed_by or level or self.workload)

    @property
    def stage_ranks(self) -> StageRanks:
        """The ranks of a pipeline stage, for packing; in level steps those that share experts count as one."""
        together = self.layout.ep_ranks if self.levels_steps else 1
        pool, per_node = self.layout.pool_size // together, max(1, self.ranks_per_node // together)
        # All ranks of a node, or a divisor of node and stage: 4 if a node has 8 ranks and the stage 12.
        per_node = pool if pool <= per_node else gcd(pool, per_node)
        speeds = self.speeds and tuple(np.reshape(self.speeds, (-1, together)).min(axis=1).tolist())
        return StageRanks(pool, per_node, self.layout.pools, speeds, together)

    def _phased(self, prices: DocumentPrices) -> DocumentPrices:
        return prices if self.phases is None else PhasedPrices(prices, self.phases)

    def sharded(self, micro_batches: Sequence[MicroBatch]) -> Shards:
        """What every rank of a pool computes and exchanges in each of ``micro_batches``, which name no ranks."""
        return price_shards(
            [one.lengths for one in micro_batches],
            self.layout.pool_size,
            self.sharding.strategy,
            self.costs,
            [one.earlier if one.is_slice else None for one in micro_batches],
        )

    def level_shards(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[list[int], Costs, Shards]]:
        """Shards of micro-batches of level steps: those of equally many ranks, on equally many nodes, together.

        Yields the places of the micro-batches of a kind, its prices, and its shards. A micro-batch that names no ranks
        is of all ranks of the pool. One document alone is shared by ``LEVEL_SHARDING``.
        """
        kinds = defaultdict[tuple[int, int, str], list[int]](list)
        for place, one in enumerate(micro_batches):
            ranks = one.ranks or range(self.layout.pool_size)
            shares = len(ranks) > 1 and len(one.segments) > 1
            nodes = len({rank // self.ranks_per_node for rank in ranks})
            kinds[len(ranks), nodes, self.sharding.strategy if shares else LEVEL_SHARDING].append(place)
        for (size, nodes, strategy), places in sorted(kinds.items()):
            of_kind = replace(self.costs, nodes=nodes)
            yield places, of_kind, price_shards([micro_batches[n].lengths for n in places], size, strategy, of_kind)

    def priced_as_run(self, plan: StepPlan) -> StepPlan:
        """``plan`` with the seconds of its micro-batches, by which they are dealt to ranks and ordered.

        With ``packed_by`` the prices do not change.
        """
        if self.packed_by is not None:
            return plan
        micro_batches = plan.micro_batches
        if self.levels_steps:
            forward, backward = np.zeros((2, len(micro_batches)))
            for places, costs, shards in self.level_shards(micro_batches):
                forward[places], backward[places] = Priced.of(shards, costs).whole
        else:
            forward, backward = Priced.of(self.sharded(micro_batches), self.costs).whole
        if self.phases is not None:
            encoders = np.array([self.phases.of(one.segments).sum() for one in micro_batches])
            forward = forward + encoders * FORWARD_SHARE
            backward = backward + encoders * (1 - FORWARD_SHARE)
        if self.speeds is not None and self.levels_steps:
            slowest = np.array([min(self.speeds[rank] for rank in one.ranks) for one in micro_batches])
            forward, backward = forward / slowest, backward / slowest
        return with_seconds(plan, forward + backward, forward)

    @property
    def pools_decided(self) -> bool:
        """Whether the pools are known, and what each of them runs; other packers than balanced leave nothing open."""
        packing = self.packing
        decided = self.levels_steps or "auto" not in (packing.grouping, packing.rank_micro_batches)
        return not packing.is_balanced or (decided and self.layout.pool is not None)

    def with_pools(self, grouping: Grouping, pool: int, rank_micro_batches: int | Literal["auto"] = "auto") -> Self:
        """The same job with these pools. Raises ``UserError`` if they cannot run."""
        packing = self.packing.changed(grouping=grouping, rank_micro_batches=rank_micro_batches)
        return replace(self, layout=replace(self.layout, pool=pool), packing=packing)

    def _check_pools(self) -> None:
        """Raise ``UserError`` if a pipeline cannot run its micro-batches, or documents would have no room in them."""
        layout, count, factor = self.layout, self.rank_micro_batches, self.packing.max_length_factor
        given, most = f"rank_micro_batches = {count}", min(MOST_MICRO_BATCHES, _MOST_OF_A_WINDOW * self.global_batch)
        if self.speeds is not None and self.levels_steps and len(self.speeds) != layout.pool_size:
            raise UserError(
                f"there are {len(self.speeds)} speeds for {layout.pool_size} ranks in level steps; give one per rank"
            )
        if not self.packing.is_balanced or self.levels_steps:
            return
        if count < layout.pp:
            raise UserError(f"{given} cannot fill the pp = {layout.pp} pipeline stages; raise it")
        if self.step_micro_batches > most:
            lower = f"lower it to {most // layout.pools}"
            remedy = lower if most >= layout.pools * layout.pp else "raise parallel.pool or packing.global_batch"
            raise UserError(
                f"{given} divides a global batch of {self.global_batch} context windows "
                f"into {self.step_micro_batches} micro-batches, over {most}; {remedy}"
            )
        if factor != "auto" and factor < self.least_length_factor:
            raise UserError(
                f"max_length_factor = {factor:g} leaves no room for a global batch of "
                f"{self.global_batch} context windows in {self.step_micro_batches} micro-batches; give at least "
                f'{ceil(100 * self.least_length_factor) / 100:g}, or "auto"'
            )

    def _check_expert_groups(self) -> None:
        """Raise ``UserError`` if ranks that share experts, and so run every layer together, could run other orders."""
        size, together = self.layout.pool_size, self.layout.ep_ranks
        said = f"the {together} ranks that share experts (ep = {self.layout.ep}, tp = {self.layout.tp})"
        if not self.packing.is_balanced and size % together and together % size:
            raise UserError(f"cp = {size} and {said} do not divide each other; change one of the sizes")
        if self.packing.is_balanced and self.layout.pool is not None and size % together:
            raise UserError(f"pool = {size} splits {said}; give a multiple of {together}")
        if not self.packing.is_balanced and self.plans_operations and size < together:
            raise UserError(
                f"schedule = 'planned' orders the operations of each pool of cp = {size} by itself, and {said} are in "
                "several; give another schedule, or a larger cp"
            )

    def _check_level_steps(self) -> None:
        layout = self.layout
        if layout.pool not in (None, layout.dp_cp):
            raise UserError(
                f"grouping = 'level' pools all dp x cp = {layout.dp_cp} ranks, not pool = {layout.pool}; leave pool out"
            )
        if layout.pp > 1:
            raise UserError(
                f"grouping = 'level' gives ranks different numbers of micro-batches, which the pp = {layout.pp} "
                'stages of a pipeline cannot run; give "slices" or "even"'
            )
        if not layout.keeps_weights:
            raise UserError("grouping = 'level' keeps gathered weights all step; leave weights = 'gathered' out")
        if self.packed_by is not None or self.phases is not None:
            raise UserError(
                "level steps (own_lists) need prices of documents on any number of ranks, which workload and phases do "
                "not have; leave these out, or own_lists"
            )

    def measured(self, prices: tuple[float, float, float] | None, speeds: tuple[float, ...] | None) -> Self:
        """The same job with the results of ``wlb.runtime.calibration``; without prices it keeps its own.

        ``prices`` are ``square``, ``token`` and ``fixed`` of ``FittedPrices``. A measured backward includes the
        recomputation of activation checkpointing, which ``Costs`` would add again, so it is taken out here.
        """
        if prices is None:
            return replace(self, speeds=speeds)
        again = 1 + FORWARD_SHARE
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


def _check_async_tp(config: JobConfig, rates: Hardware) -> None:
    tp, compiled = config.parallel.tp, config.training.compile
    if not (rates.device_type == "cuda" and compiled and 1 < tp <= rates.node_size):
        raise UserError(
            f"training.async_tp needs CUDA, training.compile and a parallel.tp of 2 to {rates.node_size} (a node), not "
            f"{rates.device_type}, compile = {str(compiled).lower()}, tp = {tp}; change them, or leave async_tp out"
        )


def compute_type(training: TrainingConfig, device_type: str) -> str:
    """The type of forward and backward passes: ``training.dtype``, or the fast type of the device for "auto"."""
    return _FAST_TYPE[device_type] if training.dtype == "auto" else training.dtype
