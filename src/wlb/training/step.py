"""One optimizer step, as every rank runs it: what the ranks agree on before it, and all that it computes.

The trainer runs it with what it has built, and so does a dry run (``wlb.training.dry_run``).
"""

from __future__ import annotations

import torch

from wlb.attention.profiler_regions import region
from wlb.job.config import TrainingConfig
from wlb.training.data.loader import LoadedStep
from wlb.training.non_finite import NonFiniteSteps
from wlb.training.observe.imbalance import RankSteps
from wlb.training.observe.monitor import Monitor
from wlb.training.observe.reporter import StepOutcome
from wlb.training.optimizer import clip_gradients, learning_rate, set_learning_rate
from wlb.training.parallel.mesh import JobMesh
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.training.phases import RankModel
from wlb.training.runtime.collectives import gathered_rows
from wlb.training.runtime.failures import TrainingError


def any_asked_to_end(step: int, loaded: LoadedStep, mesh: JobMesh, device: torch.device, requested: bool) -> bool:
    """Whether any rank was asked to end (``requested`` of this one), before it trains ``loaded`` as step ``step``.

    Raises ``TrainingError`` unless all ranks are about to train the same.
    """
    row = (loaded.fingerprint, loaded.shard_fingerprint, requested)
    with region("plan agreement"):
        rows = gathered_rows(row, torch.int64, device)
    same_plan = bool((rows[:, 0] == rows[0, 0]).all())
    by_dp = rows[mesh.work.mesh.movedim(1, 0).flatten(1), 1]  # (dp, the other ranks)
    same_shards = bool((by_dp == by_dp[:, :1]).all())
    if not (same_plan and same_shards):
        raise TrainingError(
            f"step {step}: ranks planned different {'shards' if same_plan else 'steps'}; the token store, "
            "the configuration and the version of wlb-llm must be the same on all machines"
        )
    return bool(rows[:, 2].any())


def train_step(
    step: int,
    loaded: LoadedStep,
    training: TrainingConfig,
    model: RankModel,
    runner: PipelineRunner,
    monitor: Monitor,
    non_finite: NonFiniteSteps,
) -> tuple[StepOutcome, RankSteps]:
    """Train ``loaded`` as step ``step``; what came of it, and the rows of all ranks. Its seconds are not known here."""
    rate = learning_rate(step, training)
    set_learning_rate(model.optimizers, rate)
    for optimizer in model.optimizers:
        optimizer.zero_grad()
    share = runner.run_step(loaded.batches, loaded.loss_tokens)
    rows = monitor.exchange(loaded, share)
    loss = float(rows["loss_share"].sum())
    with region("gradient norm"):
        grad_norm = clip_gradients(model.stages, training.gradient_clip)
    skipped = non_finite.check(step, loss, grad_norm, loaded.plan, runner.losses)
    if not skipped:
        with region("optimizer"):
            for optimizer in model.optimizers:
                optimizer.step()
    return StepOutcome(loss, grad_norm, rate, 0.0, skipped), rows
