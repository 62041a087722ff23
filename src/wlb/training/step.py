"""One optimizer step, as every rank runs it: what the ranks agree on before it, and all that it computes."""

from __future__ import annotations

import torch

from wlb.attention.profiler_regions import region
from wlb.runtime.collectives import gathered_rows
from wlb.training.data.loader import LoadedStep
from wlb.training.failures import TrainingError
from wlb.training.non_finite import NonFiniteSteps
from wlb.training.observe.imbalance import RankSteps
from wlb.training.observe.monitor import Monitor
from wlb.training.observe.reporter import StepOutcome
from wlb.training.optimizer import clip_gradients, learning_rate, set_learning_rate
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.training.phases import RankModel


def agree_to_train(step: int, loaded: LoadedStep, model: RankModel, asked_to_end: bool) -> bool:
    """Whether the ranks train ``loaded`` as step ``step``: not where any of them was ``asked_to_end``.

    Raises ``TrainingError`` where they planned different steps, or shards of them.
    """
    row = (loaded.fingerprint, loaded.shard_fingerprint, asked_to_end)
    with region("plan agreement"):
        plans, shards, ending = gathered_rows(row, torch.int64, model.execution.device).T
    by_dp = shards[model.mesh.work.mesh.movedim(1, 0).flatten(1)]  # (dp, the other ranks)
    same_plans = bool((plans == plans[0]).all())
    if not (same_plans and (by_dp == by_dp[:, :1]).all()):
        raise TrainingError(
            f"step {step}: ranks planned different {'shards' if same_plans else 'steps'}; the token store, "
            "the configuration and the version of wlb-llm must be the same on all machines"
        )
    return not ending.any()


def train_step(
    step: int,
    loaded: LoadedStep,
    model: RankModel,
    runner: PipelineRunner,
    monitor: Monitor,
    non_finite: NonFiniteSteps,
) -> tuple[StepOutcome, RankSteps]:
    """Train ``loaded`` as step ``step``; what came of it, and the rows of all ranks. Its seconds are not known here."""
    training = model.checked.config.training
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
