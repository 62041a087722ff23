"""What is simulated: a model, hardware, a 4D layout, and how documents are packed and sharded.

A ``SimulatedJob`` holds everything that the seconds of a step follow from, once the documents are known. It comes from
a job's configuration (``SimulatedJob.from_config``) or from keywords (``simulated_job``), and refuses layouts that
could not run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from wlb.config import PRESETS, DataConfig, JobConfig, ModelConfig, PackingConfig, ShardingConfig
from wlb.config_file import first_problem
from wlb.errors import UserError
from wlb.schedules.operations import rank_operations
from wlb.sharding.document_prices import packing_prices
from wlb.workload import Hardware, ModelShape, Workload, hardware_preset, make_workload, model_shape
from wlb.workload.base import DocumentPrices
from wlb.workload.layer_memory import Checkpointing
from wlb.workload.layer_split import split_layers
from wlb.workload.profile import WorkloadProfile

_DATA = DataConfig(store=Path("documents"))


@dataclass(frozen=True)
class SimulatedJob:
    """A job on tp x cp x pp x dp GPUs.

    ``packing.micro_batches`` counts all data-parallel ranks. ``data`` says in which order documents come and what
    happens to overlong ones; its store is not opened. ``schedule`` may be any of ``wlb.simulate.SCHEDULES``. A
    measured ``profile``, of one tensor-parallel rank, replaces the hardware's prices of computing; links stay the
    hardware's.

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

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "pp", "dp", "virtual_pp"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)} is not a group size; it must be at least 1")
        micro_batches = self.packing.micro_batches
        if micro_batches % self.dp:
            raise UserError(
                f"{micro_batches} micro-batches cannot be dealt evenly to dp = {self.dp} ranks; give a multiple"
            )
        rank_operations(self.schedule, self.pp, self.micro_batches_per_rank, self.virtual_pp)
        split_layers(self.shape, self.stages)
        make_workload(self.shape, self.hardware, self.tp, self.cp)
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
    def packing_prices(self) -> DocumentPrices:
        """The prices by which the trainer packs this job."""
        return packing_prices(
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
        profile: WorkloadProfile | None = None,
    ) -> SimulatedJob:
        """The job that ``config`` describes, on ``hardware``; ``shape`` if it is known from elsewhere.

        With ``packing.max_length_factor = "auto"`` L_max is what fits the hardware's memory.
        """
        from wlb.simulate.memory import with_length_factor

        parallel = config.parallel
        return with_length_factor(
            cls(
                shape=shape or configured_shape(config.model),
                hardware=hardware_preset(hardware) if isinstance(hardware, str) else hardware,
                packing=config.packing,
                sharding=config.sharding,
                data=config.data,
                **parallel.model_dump(),
                activation_checkpointing=config.training.activation_checkpointing,
                profile=profile,
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
    return SimulatedJob(
        shape=replicate_kv_heads(shape, layout.get("tp", 1)),
        hardware=hardware_preset(hardware) if isinstance(hardware, str) else hardware,
        packing=_packing(settings),
        sharding=ShardingConfig(**({"strategy": sharding} if sharding else sections.get("sharding", {}))),
        data=_DATA.model_copy(update={"context_window": context_window}),
        dp=dp,
        pp=pp,
        **layout,
    )


def _packing(settings: dict[str, Any]) -> PackingConfig:
    try:
        return PackingConfig(**settings)
    except ValidationError as error:
        raise UserError(f"a job cannot be packed so: {first_problem(error)}") from None


def replicate_kv_heads(shape: ModelShape, tp: int) -> ModelShape:
    """``shape`` as ``tp`` ranks hold it: with fewer key/value heads than ranks, each head stands on several of them."""
    if shape.kv_heads < tp and tp % shape.kv_heads == 0 and shape.heads % tp == 0:
        return replace(shape, kv_heads=tp)
    return shape


def configured_shape(model: ModelConfig) -> ModelShape:
    """The shape that ``[model]`` names, with what it overrides. Raises ``UserError`` for a directory of weights."""
    if model.pretrained is not None:
        raise UserError(f"model.pretrained = {model.pretrained} cannot be simulated; name a preset and its dimensions")
    given = {name: value for name in ModelShape.__dataclass_fields__ if (value := getattr(model, name)) is not None}
    shape = replace(model_shape(model.name), **given)
    if "head_dim" not in given and ("hidden" in given or "heads" in given):
        shape = replace(shape, head_dim=shape.hidden // shape.heads)
    return shape
