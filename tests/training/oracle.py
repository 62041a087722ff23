"""What training has to come to: a plain loop over single documents, in one process, on the unparallelised model."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from wlb.attention import segment_attention
from wlb.documents.store.reader import TokenStore
from wlb.job.config import JobConfig
from wlb.models.experts import Routing, end_step, mixtures
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Transformer
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.runtime.batch import Batch
from wlb.runtime.reading import labels_of_segments, make_batch
from wlb.runtime.steps import RankStep
from wlb.training.environment import trained_model
from wlb.training.optimizer import build_optimizer, learning_rate
from wlb.training.trainer import Trainer


def losses_of_single_documents(config: JobConfig, plans: Sequence[StepPlan]) -> list[float]:
    """The loss of every step of ``plans``, trained from the first on in float64, one segment at a time."""
    store = TokenStore.open(config.data.stores[0])
    model_config = trained_model(config, store)
    model = Transformer(model_config).double()
    initialise_weights(model, layers=model_config.shape.layers, seed=config.training.seed)
    optimizer = build_optimizer(model, config.training)
    mixed, training = mixtures([model]), config.training
    for mixture in mixed.values():
        mixture.reset_state()
    losses = []
    for step, plan in enumerate(plans, start=1):
        optimizer.zero_grad()
        loss_tokens, total = labels_of_segments([*plan.segments], store).sum(), 0.0
        routed = []
        for segment in plan.segments:
            batch = make_batch(MicroBatch((segment,), 0.0), store)
            attend = partial(segment_attention, segment_lengths=batch.segment_lengths, backend="reference")
            weights = training.balance_loss / plan.tokens, training.router_z_loss / plan.tokens
            routed.append(Routing(segment.length, *weights))
            scores = model(batch.tokens, batch.position_ids, attend, routed[-1])
            loss = F.cross_entropy(scores, batch.labels, reduction="sum") / loss_tokens
            loss.backward()
            total += loss.item()
        _clip([weight.grad for weight in model.parameters() if weight.grad is not None], config.training.gradient_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.training)
        optimizer.step()
        if mixed:
            end_step(mixed, routed, model_config.shape, torch.device("cpu"), training.router_bias_rate)
        losses.append(total)
    return losses


def _clip(gradients: list[torch.Tensor], largest: float) -> None:
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()  # torch's clip_grad_norm_ adds 1e-6 to it
    if norm > largest:
        for gradient in gradients:
            gradient *= largest / norm


def remembered_plans(trainer: Trainer) -> list[StepPlan]:
    """A list to which ``trainer`` adds the plan of every step that it trains from now on."""
    plans: list[StepPlan] = []
    train_step = trainer._train_step

    def remember(loaded: RankStep[Batch]) -> None:
        plans.append(loaded.plan)
        train_step(loaded)

    trainer._train_step = remember  # type: ignore[method-assign]
    return plans
