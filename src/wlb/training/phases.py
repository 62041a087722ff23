"""How a trainer comes up, in phases: its model, the state to continue from, its data, and whom it tells of it.

Every rank goes through each phase, as each talks to the other ranks. A phase takes what those before it have returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from wlb.config import JobConfig
from wlb.documents.store.mixture import TrainedStore
from wlb.models.pretrained import load_weights
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.planning.job import JobSpec
from wlb.training.checkpoint.checkpointer import Checkpointer, Progress
from wlb.training.checkpoint.resuming import agreed_checkpoint
from wlb.training.data.loader import RankShare, StepLoader
from wlb.training.evaluation.evaluator import Evaluator
from wlb.training.observe.monitor import Monitor, rank_names
from wlb.training.observe.reporter import Reporter
from wlb.training.optimizer import build_optimizer
from wlb.training.parallel.mesh import JobMesh, build_mesh, seed_this_rank
from wlb.training.parallel.parallelize import Execution, build_stage_modules
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.training.runtime.environment import compute_dtype, hardware_name, trained_model


@dataclass(frozen=True)
class RankModel:
    """What a rank holds of the model ``config`` of ``job``, and where.

    Weights have their initial values, unless they are yet to come from ``checkpoint`` or from a pretrained model.
    """

    job: JobSpec
    config: TransformerConfig
    mesh: JobMesh
    execution: Execution
    stages: list[Transformer]
    optimizers: list[torch.optim.AdamW]
    checkpoint: Path | None


@dataclass(frozen=True)
class RankData:
    """The steps of the job, and this rank's share of each."""

    loader: StepLoader
    share: RankShare


def build_model(config: JobConfig, store: TrainedStore, device: torch.device) -> RankModel:
    """Arrange the ranks, agree where the job starts from, and build this rank's stages and their optimizers."""
    model = trained_model(config, store)
    job = JobSpec.from_config(config, hardware_name(device), model=model)
    execution = Execution(device, compute_dtype(config.training, device))
    mesh = build_mesh(config.parallel, device.type)
    seed_this_rank(config.training.seed, mesh)
    checkpoint = agreed_checkpoint(config.checkpoint)
    training = config.training
    initialise = checkpoint is None and config.model.pretrained is None
    stages = build_stage_modules(
        model,
        config.parallel,
        mesh,
        execution,
        seed=training.seed if initialise else None,
        activation_checkpointing=training.activation_checkpointing,
        compiled=training.compile,
    )
    optimizers = [build_optimizer(stage, training) for stage in stages]
    return RankModel(job, model, mesh, execution, stages, optimizers, checkpoint)


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
        load_weights(config.model.pretrained, model.stages)
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
