"""One optimizer step, as every rank runs it: what the ranks agree on before it, and all that it computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wlb.attention.profiler_regions import region
from wlb.packing.plan import StepPlan
from wlb.runtime.collectives import gathered, gathered_rows
from wlb.runtime.own_lists import own_micro_batches
from wlb.training.data.loader import LoadedStep
from wlb.training.failures import TrainingError
from wlb.training.observe.imbalance import RankSteps
from wlb.training.observe.monitor import Monitor
from wlb.training.observe.reporter import StepOutcome
from wlb.training.optimizer import clip_gradients, learning_rate, set_learning_rate
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.training.phases import RankModel

_DOCUMENTS_NAMED = 50  # in a message


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
) -> tuple[StepOutcome, RankSteps]:
    """Train ``loaded`` as step ``step``; what came of it, and the rows of all ranks. Its seconds are not known here.

    Raises ``TrainingError``, with weights as they were, where the loss or the gradient norm is not finite.
    """
    training = model.checked.config.training
    rate = learning_rate(step, training)
    set_learning_rate(model.optimizers, rate)
    for optimizer in model.optimizers:
        optimizer.zero_grad()
    share = runner.run_step(loaded.batches, loaded.loss_tokens)
    rows = monitor.exchange(loaded, share)
    loss = float(rows.loss_share.sum())
    with region("gradient norm"):
        grad_norm = clip_gradients(model.stages, training.gradient_clip)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):  # on every rank alike
        documents = _documents_to_blame(loaded.plan, model, runner.losses)
        raise TrainingError(f"step {step}: loss is {loss} and gradient norm {grad_norm}; {documents}")
    with region("optimizer"):
        for optimizer in model.optimizers:
            optimizer.step()
    return StepOutcome(loss, grad_norm, rate), rows


def _documents_to_blame(plan: StepPlan, model: RankModel, losses: Sequence[Tensor]) -> str:
    """Those of micro-batches whose loss is not finite; ``losses`` are this rank's, on ranks of the last stage."""
    mine = zip(own_micro_batches(plan, model.share.dp_rank, model.share.cp_rank), losses, strict=False)
    found = [segment.document for part, loss in mine if not torch.isfinite(loss) for segment in part.segments]
    documents = {document for of_rank in gathered(found) for document in of_rank}
    if not documents:
        return "the loss of every micro-batch is finite"
    named = ", ".join(map(str, sorted(documents)[:_DOCUMENTS_NAMED]))
    more = f" and {len(documents) - _DOCUMENTS_NAMED} more" if len(documents) > _DOCUMENTS_NAMED else ""
    return f"not finite in the micro-batches of documents {named}{more}"
