"""The part of the model that a rank holds; all ranks build theirs together."""

from dataclasses import dataclass
from pathlib import Path

import torch

from wlb.job.job import compute_type
from wlb.models.transformer import Transformer
from wlb.runtime.batch import RankSlice
from wlb.runtime.collectives import gathered, on_every_rank
from wlb.training.checkpoint.files import candidates
from wlb.training.optimizer import build_optimizer
from wlb.training.parallel.mesh import JobMesh, build_mesh
from wlb.training.parallel.parallelize import Execution, build_stage_modules
from wlb.training.parallel.tensor_parallel import overlap_collectives
from wlb.training.preflight import CheckedJob, check_agreed


@dataclass(frozen=True)
class RankModel:
    """A rank's part of the model of ``checked``, its place among the ranks, and how it computes.

    The ranks continue from the newest undamaged one of ``checkpoints``, if any. Weights have their initial values,
    unless they will be loaded from a checkpoint or a pretrained model.
    """

    checked: CheckedJob
    mesh: JobMesh
    share: RankSlice
    execution: Execution
    checkpoints: list[Path]
    stages: list[Transformer]
    optimizers: list[torch.optim.AdamW]


def build_model(checked: CheckedJob, device: torch.device) -> RankModel:
    """Arrange the ranks, agree on the checkpoints to start from, and build this rank's stages and their optimizers.

    Raises ``TrainingError`` if ranks decided on different jobs, whose groups would wait for each other.
    """
    config, job, training = checked.config, checked.job, checked.config.training
    check_agreed(job)
    execution = Execution(device, getattr(torch, compute_type(training, job.hardware.device_type)))
    mesh = build_mesh(job.layout, device.type)
    torch.manual_seed(training.seed)
    checkpoints = gathered(on_every_rank(lambda: candidates(config.checkpoint)))[0]
    seed = None if checkpoints or config.model.pretrained is not None else training.seed
    if training.async_tp:
        overlap_collectives(mesh.group("tp"))
    kept, compiled = job.activation_checkpointing, training.compile
    stages = build_stage_modules(
        checked.model, job.layout, mesh, execution, seed=seed, activation_checkpointing=kept, compiled=compiled
    )
    optimizers = [build_optimizer(stage, training) for stage in stages]
    share = RankSlice(mesh.rank("dp"), mesh.rank("cp"), job.layout, job.sharding.strategy, job.costs, mesh.group("cp"))
    return RankModel(checked, mesh, share, execution, checkpoints, stages, optimizers)
