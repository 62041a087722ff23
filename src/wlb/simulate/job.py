"""What is simulated: a model, hardware, a 4D layout, and how documents are packed and sharded.

A ``SimulatedJob`` holds everything that the seconds of a step follow from, once the documents are known. It comes from
a job's configuration (``SimulatedJob.from_config``) or from keywords (``simulated_job``), and refuses layouts that
could not run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wlb.config import PRESETS, DataConfig, JobConfig, PackingConfig, ParallelConfig, ShardingConfig
from wlb.config_file import validated
from wlb.errors import UserError
from wlb.memory.layers import Checkpointing, MemorySettings
from wlb.memory.step import MemoryEstimate, gib, largest_length_factor, predict_even_step
from wlb.planning.memory import (
    USABLE_SHARE,
    compute_bytes,
    holds_checkpoint_copy,
    job_memory_settings,
    longest_micro_batch,
)
from wlb.planning.prices import packing_prices
from wlb.planning.shape import configured_shape
from wlb.schedules.layer_split import split_layers
from wlb.schedules.operations import ZERO_BUBBLE, rank_operations, stages_of_rank
from wlb.sharding import check_group_size
from wlb.workload import Hardware, ModelShape, Workload, hardware_preset, make_workload, model_shape
from wlb.workload.base import DocumentPrices
from wlb.workload.profile import WorkloadProfile
from wlb.workload.shapes import check_divisible

_DATA = DataConfig(store=Path("documents"))


@dataclass(frozen=True)
class SimulatedJob:
    """A job on tp x cp x pp x dp GPUs.

    ``packing.micro_batches`` counts all data-parallel ranks. ``data`` says in which order documents come and what
    happens to overlong ones; its store is not opened. ``schedule`` may be any of ``wlb.simulate.SCHEDULES``. A
    measured ``profile``, of one tensor-parallel rank, replaces the hardware's prices of computing; links stay the
    hardware's. ``packed_by`` are the prices that it packs by, if not the trainer's. ``tied_embeddings``,
    ``compute_bytes`` of a value (default: the hardware's) and ``checkpoint_copy`` decide what the job holds in memory
    and nothing else.

    Raises ``UserError`` for a layout that cannot run.
    """

    shape: ModelShape
    hardware: Hardware
    packing: PackingConfig
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    data: DataConfig = _DATA
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    virtual_pp: int = 1
    schedule: str = "1f1b"
    activation_checkpointing: Checkpointing = "none"
    profile: WorkloadProfile | None = None
    packed_by: DocumentPrices | None = None
    tied_embeddings: bool = False
    compute_bytes: int | None = None
    checkpoint_copy: bool = False

    def __post_init__(self) -> None:
        check_group_size(self.cp)
        for name in ("tp", "pp", "dp", "virtual_pp"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)} is not a group size; it must be at least 1")
        micro_batches = self.packing.micro_batches
        if micro_batches % self.dp:
            raise UserError(
                f"{micro_batches} micro-batches cannot be dealt evenly to dp = {self.dp} ranks; give a multiple"
            )
        split_layers(self.shape, self.stages)
        rank_operations(self.schedule, self.pp, self.micro_batches_per_rank, self.virtual_pp)
        make_workload(self.shape, self.hardware, self.tp, self.cp)
        check_divisible(self.shape, self.tp)
        self._check_profile()

    def _check_profile(self) -> None:
        profile = self.profile
        if profile is None:
            return
        ours, theirs = (replace(shape, vocab_size=1) for shape in (self.shape, profile.model))
        if ours != theirs:
            raise UserError(
                f"the profile was measured with {theirs}, the job's model is {ours}; measure its own profile"
            )
        if profile.cp != 1:
            raise UserError(f"the profile was measured with cp = {profile.cp}; the simulation needs one of cp = 1")

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def stages(self) -> int:
        return self.pp * self.virtual_pp

    @property
    def rank_stages(self) -> list[list[int]]:
        """The stages of every pipeline rank."""
        return [list(stages_of_rank(self.schedule, rank, self.pp, self.virtual_pp)) for rank in range(self.pp)]

    @property
    def context_window(self) -> int:
        return self.data.context_window

    @property
    def micro_batches_per_rank(self) -> int:
        return self.packing.micro_batches // self.dp

    @property
    def workload(self) -> Workload:
        """W_a and W_l of a micro-batch on the tp x cp GPUs that run it."""
        return make_workload(self.shape, self.hardware, tp=self.tp, cp=self.cp)

    @property
    def work_prices(self) -> DocumentPrices:
        """What the work of training a document is worth, whatever the system: W_a + W_l, measured where possible."""
        return self.workload if self.profile is None else self.profile.workload()

    @property
    def packing_prices(self) -> DocumentPrices:
        """The prices by which this job packs."""
        return self.packed_by or packing_prices(
            self.packing,
            self.sharding,
            self.shape,
            self.hardware,
            tp=self.tp,
            cp=self.cp,
            context_window=self.context_window,
        )

    @property
    def sharding_workload(self) -> Workload:
        """The prices by which the trainer shards it."""
        return make_workload(self.shape, self.hardware, tp=self.tp)

    @classmethod
    def from_config(
        cls,
        config: JobConfig,
        hardware: str | Hardware = "h100",
        *,
        shape: ModelShape | None = None,
        tied_embeddings: bool | None = None,
        vocab_size: int | None = None,
        profile: WorkloadProfile | None = None,
    ) -> SimulatedJob:
        """The job that ``config`` describes, on ``hardware``.

        ``shape`` and ``tied_embeddings`` are those of ``model.pretrained``, or None; ``vocab_size`` is that of the
        token store, where it is known. With ``packing.max_length_factor = "auto"`` L_max is what fits the hardware's
        memory.
        """
        rates = hardware_preset(hardware) if isinstance(hardware, str) else hardware
        return with_length_factor(
            cls(
                shape=shape or configured_shape(config.model, vocab_size),
                hardware=rates,
                packing=config.packing,
                sharding=config.sharding,
                data=config.data,
                **config.parallel.model_dump(),
                activation_checkpointing=config.training.activation_checkpointing,
                profile=profile,
                tied_embeddings=config.model.tied_embeddings if tied_embeddings is None else tied_embeddings,
                compute_bytes=compute_bytes(config.training, rates.device_type),
                checkpoint_copy=holds_checkpoint_copy(config.checkpoint, rates.device_type),
            )
        )


def simulated_job(
    model: str | ModelShape,
    context_window: int,
    preset: str = "best",
    *,
    hardware: str | Hardware = "h100",
    micro_batches: int | None = None,
    packing: dict[str, Any] | None = None,
    sharding: str | None = None,
    dp: int = 1,
    pp: int = 1,
    **layout: Any,
) -> SimulatedJob:
    """A job of ``model`` under one of the systems in ``wlb.config.PRESETS``.

    ``micro_batches`` is for each data-parallel rank, by default as many as pipeline ranks; ``packing`` and ``sharding``
    replace settings of the preset; ``layout`` are further fields of ``SimulatedJob`` (tp, cp, ...).

    Raises ``UserError`` for settings that no job could have.
    """
    if preset not in PRESETS:
        raise UserError(f"preset {preset!r} is unknown; choose from {', '.join(PRESETS)}")
    sections = PRESETS[preset]
    per_rank = pp if micro_batches is None else micro_batches
    settings = sections.get("packing", {}) | {"micro_batches": per_rank * dp} | (packing or {})
    shape = model_shape(model) if isinstance(model, str) else model
    strategy = {"strategy": sharding} if sharding else sections.get("sharding", {})
    job = SimulatedJob(
        shape=replicate_kv_heads(shape, layout.get("tp", 1)),
        hardware=hardware_preset(hardware) if isinstance(hardware, str) else hardware,
        packing=validated(PackingConfig, settings, "packing"),
        sharding=validated(ShardingConfig, strategy, "sharding"),
        data=_DATA.model_copy(update={"context_window": context_window}),
        dp=dp,
        pp=pp,
        **layout,
    )
    return with_length_factor(job)


def replicate_kv_heads(shape: ModelShape, tp: int) -> ModelShape:
    """``shape`` as ``tp`` ranks hold it: with fewer key/value heads than ranks, each head stands on several of them."""
    if shape.kv_heads < tp and tp % shape.kv_heads == 0 and shape.heads % tp == 0:
        return replace(shape, kv_heads=tp)
    return shape


def usable_bytes(job: SimulatedJob) -> float:
    """What one process of the job may hold."""
    return USABLE_SHARE * job.hardware.memory_bytes


def predicted_memory(job: SimulatedJob) -> MemoryEstimate:
    """The most that a process holds in the worst step: every micro-batch as long as L_max."""
    return predict_even_step(memory_settings(job), longest_micro_batch(job))


def with_length_factor(job: SimulatedJob) -> SimulatedJob:
    """``job`` with ``packing.max_length_factor = "auto"`` replaced by the most that its GPUs hold.

    Raises ``UserError`` where they do not hold one window.
    """
    if not job.packing.has_length_factor or job.packing.length_factor != "auto":
        return job
    factor = largest_length_factor(memory_settings(job), job.context_window, usable_bytes(job))
    if factor is None:
        smallest = replace(job, packing=job.packing.with_length_factor(1.0))
        raise UserError(
            f"micro-batches of {job.context_window} tokens need {gib(predicted_memory(smallest).total)} GiB a GPU, "
            f"over the usable {gib(usable_bytes(job))}; raise parallel.cp, tp, pp or dp, or lower data.context_window"
        )
    return replace(job, packing=job.packing.with_length_factor(factor))


def memory_settings(job: SimulatedJob) -> MemorySettings:
    """What the memory model asks about a job. Zero-bubble schedules count as 1F1B of as many stages, which is less."""
    schedule = "interleaved_1f1b" if job.virtual_pp > 1 else "1f1b" if job.schedule in ZERO_BUBBLE else job.schedule
    parallel = ParallelConfig.model_validate(
        {name: getattr(job, name) for name in ("dp", "pp", "cp", "tp", "virtual_pp")} | {"schedule": schedule}
    )
    return job_memory_settings(
        job.shape,
        parallel,
        job.packing,
        job.sharding,
        device_type=job.hardware.device_type,
        compute_bytes=job.compute_bytes or job.hardware.bytes_per_value,
        activation_checkpointing=job.activation_checkpointing,
        tied_embeddings=job.tied_embeddings,
        checkpoint_copy=job.checkpoint_copy,
    )
