"""The phases of building a trainer: mesh, model, restored state, data, reporter.

Every rank goes through each phase, as each talks to the other ranks. A phase takes what those before it have returned.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from wlb.documents.store.mixture import TrainedStore
from wlb.job.config import JobConfig
from wlb.job.job import JobSpec
from wlb.models.huggingface.weights import PretrainedWeights
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.training.checkpoint.checkpointer import Checkpointer, Progress
from wlb.training.checkpoint.resuming import agreed_checkpoint
from wlb.training.data.loader import RankShare, StepLoader
from wlb.training.evaluation.evaluator import Evaluator
from wlb.training.observe.monitor import Monitor, rank_names
from wlb.training.observe.reporter import Reporter
from wlb.training.optimizer import build_optimizer
from wlb.training.parallel.mesh import JobMesh, build_mesh, seed_this_rank
from wlb.training.parallel.parallelize import Allocating, Execution, build_stage_modules
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.training.runtime.environment import compute_dtype, hardware_name, trained_model


@dataclass(frozen=True)
class RankPlace:
    """A rank's place among those that train the model ``config`` in ``job``, and how it computes.

    The ranks continue from ``checkpoint``, or begin anew.
    """

    job: JobSpec
    config: TransformerConfig
    mesh: JobMesh
    execution: Execution
    checkpoint: Path | None


@dataclass(frozen=True)
class RankModel(RankPlace):
    """What a rank holds of the model.

    Weights have their initial values, unless they are yet to come from ``checkpoint`` or from a pretrained model.
    """

    stages: list[Transformer]
    optimizers: list[torch.optim.AdamW]


@dataclass(frozen=True)
class RankData:
    """The steps of the job, and this rank's share of each."""

    loader: StepLoader
    share: RankShare


def take_place(
    config: JobConfig,
    store: TrainedStore,
    device: torch.device,
    hardware: str | None = None,
    allocating: Allocating = nullcontext,
) -> RankPlace:
    """Arrange the ranks, and agree on where the job starts from.

    ``hardware`` is a preset's name in place of that of ``device``; ``allocating`` as in ``Execution``.
    """
    model = trained_model(config, store)
    job = JobSpec.from_config(config, hardware or hardware_name(device), model=model)
    execution = Execution(device, compute_dtype(config.training, torch.device(job.hardware.device_type)), allocating)
    mesh = build_mesh(config.parallel, device.type)
    seed_this_rank(config.training.seed, mesh)
    return RankPlace(job, model, mesh, execution, agreed_checkpoint(config.checkpoint))


def build_model(config: JobConfig, place: RankPlace) -> RankModel:
    """Build this rank's stages and their optimizers."""
    training = config.training
    initialise = place.checkpoint is None and config.model.pretrained is None
    stages = build_stage_modules(
        place.config,
        config.parallel,
        place.mesh,
        place.execution,
        seed=training.seed if initialise else None,
        activation_checkpointing=training.activation_checkpointing,
        compiled=training.compile,
    )
    optimizers = [build_optimizer(stage, training) for stage in stages]
    return RankModel(**vars(place), stages=stages, optimizers=optimizers)


def build_pipeline(config: JobConfig, model: RankModel) -> tuple[PipelineRunner, Monitor]:
    """What runs a step through the stages, and what measures it."""
    monitor = Monitor(config, model.config.shape, model.mesh, model.execution.device)
    micro_batches = model.job.micro_batches_per_rank
    runner = PipelineRunner(
        model.stages, config.parallel, model.mesh, micro_batches, model.execution, clock=monitor.clock
    )
    return runner, monitor


def restore(config: JobConfig, model: RankModel) -> tuple[Checkpointer, Progress | None]:
    """Load the weights that are yet to come; where the job stands, None at its beginning."""
    checkpointer = Checkpointer(config.checkpoint, model.config, model.stages, model.optimizers, model.mesh.place)
    if model.checkpoint is not None:
        return checkpointer, checkpointer.load(model.checkpoint)
    if config.model.pretrained is not None:
        PretrainedWeights.open(config.model.pretrained).load(*model.stages)
    return checkpointer, None


def build_data(config: JobConfig, store: TrainedStore, model: RankModel, progress: Progress | None) -> RankData:
    """Begin to plan and read the steps after ``progress``; raises ``UserError`` if it was made on other data."""
    state = progress.loader if progress else None
    share = RankShare.in_job(model.job, model.mesh.rank("dp"), model.mesh.rank("cp"))
    return RankData(StepLoader(store, config, model.job, share=share, state=state), share)


def build_reporter(
    config: JobConfig, store: TrainedStore, model: RankModel, data: RankData, step: int
) -> Reporter | None:
    """Rank 0's account of the job that continues after ``step``; says where it starts."""
    names = rank_names(model.execution.device)
    if dist.get_rank() != 0:
        return None
    reporter = Reporter(config, store, model.config.shape, names, model.execution, step)
    reporter.begin(data.loader)
    return reporter


def build_evaluator(config: JobConfig, model: RankModel, data: RankData, reporter: Reporter | None) -> Evaluator | None:
    """What scores held-out documents, if there are any."""
    if config.evaluation.store is None:
        return None
    recorded = reporter.evaluated if reporter else 0
    return Evaluator(config, model.job, model.stages, model.mesh, data.share, model.execution, recorded)
