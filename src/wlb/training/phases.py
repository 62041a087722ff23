"""The phases of building a trainer: model, restored state, data, reporter.

Every rank goes through each phase, as each talks to the other ranks. A phase takes what those before it have returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from wlb.models.huggingface.weights import PretrainedWeights
from wlb.models.transformer import Transformer
from wlb.runtime.collectives import gathered, on_every_rank
from wlb.runtime.sharded_batch import RankShare
from wlb.training.checkpoint.checkpointer import Checkpointer, Progress
from wlb.training.checkpoint.resuming import candidates
from wlb.training.data.loader import StepLoader, share_in
from wlb.training.environment import compute_dtype
from wlb.training.observe.monitor import Monitor
from wlb.training.observe.reporter import Reporter
from wlb.training.optimizer import build_optimizer
from wlb.training.parallel.mesh import JobMesh, build_mesh
from wlb.training.parallel.parallelize import Execution, build_stage_modules
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.training.preflight import CheckedJob


@dataclass(frozen=True)
class RankModel:
    """What a rank holds of the model of ``checked``, its place among the ranks, and how it computes.

    The ranks continue from the newest of ``checkpoints`` that is whole, if there are any. Weights have their initial
    values, unless they are yet to come from a checkpoint or from a pretrained model.
    """

    checked: CheckedJob
    mesh: JobMesh
    share: RankShare
    execution: Execution
    checkpoints: list[Path]
    stages: list[Transformer]
    optimizers: list[torch.optim.AdamW]


def build_model(checked: CheckedJob, device: torch.device) -> RankModel:
    """Arrange the ranks, agree on where the job starts from, and build this rank's stages and their optimizers."""
    config, job, training = checked.config, checked.job, checked.config.training
    execution = Execution(device, compute_dtype(training, torch.device(job.hardware.device_type)))
    mesh = build_mesh(job.layout, device.type)
    torch.manual_seed(training.seed)
    checkpoints = gathered(on_every_rank(lambda: candidates(config.checkpoint)))[0]
    initialise = not checkpoints and config.model.pretrained is None
    stages = build_stage_modules(
        checked.model,
        job.layout,
        mesh,
        execution,
        seed=training.seed if initialise else None,
        activation_checkpointing=job.activation_checkpointing,
        compiled=training.compile,
    )
    optimizers = [build_optimizer(stage, training) for stage in stages]
    share = share_in(job, mesh.rank("dp"), mesh.rank("cp"))
    return RankModel(checked, mesh, share, execution, checkpoints, stages, optimizers)


def build_pipeline(model: RankModel) -> tuple[PipelineRunner, Monitor]:
    """What runs a step through the stages, and what measures it."""
    job = model.checked.job
    monitor = Monitor(model.checked.config.metrics, job, model.mesh, model.execution.device)
    runner = PipelineRunner(
        model.stages, job.layout, model.mesh, job.micro_batches_per_rank, model.execution, clock=monitor.clock
    )
    return runner, monitor


def restore(model: RankModel) -> tuple[Checkpointer, Progress | None]:
    """Load the weights that are yet to come; where the job stands, None at its beginning."""
    checked = model.checked
    checkpointer = Checkpointer(checked.config.checkpoint, checked.model, model.stages, model.optimizers)
    if model.checkpoints:
        return checkpointer, checkpointer.load(model.checkpoints)
    if (pretrained := checked.config.model.pretrained) is not None:
        PretrainedWeights(pretrained).load(*model.stages)
    return checkpointer, None


def build_loader(model: RankModel, progress: Progress | None) -> StepLoader:
    """Begin to plan and read the steps after ``progress``; raises ``UserError`` if it was made on other data."""
    checked, state = model.checked, progress.loader if progress else None
    return StepLoader(checked.store, checked.job, checked.config.training, share=model.share, state=state)


def build_reporter(model: RankModel, step: int) -> Reporter | None:
    """Rank 0's account of the job that continues after ``step``; says where it starts."""
    if dist.get_rank() != 0:
        return None
    reporter = Reporter(model.checked, model.execution, step)
    reporter.begin()
    return reporter
