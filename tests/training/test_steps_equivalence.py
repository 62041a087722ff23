"""Twenty optimizer steps of the whole job have the losses of a plain loop over single documents in one process.

The job is the trainer itself, with its loader, sharding, gradient clipping and learning rate, in float64. The oracle
gets the same plans, runs one segment at a time on the unparallelised model and updates it with AdamW.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.training.distributed import run_ranks
from tests.training.jobs import read_steps, settings, write_store
from wlb.attention import segment_attention
from wlb.config import JobConfig
from wlb.documents.store.reader import TokenStore
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Transformer
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.training.data.batch import labelled_tokens, make_batch
from wlb.training.data.loader import LoadedStep
from wlb.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from wlb.training.preflight import check_job
from wlb.training.runtime.environment import trained_model
from wlb.training.trainer import Trainer

STEPS = 20
WINDOW = 64
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain-4d": {"dp": 2, "pp": 2, "cp": 2},
    "fixed-4d": {"dp": 2, "tp": 2},
    "wlb-llm": {"pp": 2, "cp": 2},
    "best": {"pp": 2, "cp": 2, "tp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b"},
    # The four ranks of a stage make one pool; its three micro-batches are one round over two pipeline ranks.
    "elastic": {"dp": 2, "cp": 2, "pp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b", "pool": 4},
}
# Every preset runs through the same trainer, and each of these parts of it in the others too.
EXHAUSTIVE = ("plain-4d", "fixed-4d", "wlb-llm", "best")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    write_store(folder / "store", longest=2 * WINDOW)
    return folder


def configure(folder: Path, preset: str) -> JobConfig:
    sections = settings(
        folder,
        model={"layers": 4, "heads": 4, "kv_heads": 2, "vocab_size": 68},
        data={"context_window": WINDOW},
        parallel=LAYOUTS[preset],
        packing={"outlier_thresholds": [16, 40], "pool_micro_batches": 3, "grouping": "alike"},
        training={"steps": STEPS, "dtype": "float64", "learning_rate": 0.02, "gradient_clip": 0.5},
        metrics={"dir": str(folder / preset / "metrics")},
    )
    return JobConfig.model_validate({"preset": preset, **sections})


def _train(config: JobConfig) -> list[StepPlan]:
    trainer = Trainer(config, torch.device("cpu"))
    plans: list[StepPlan] = []
    train_step = trainer._train_step

    def remember(loaded: LoadedStep) -> None:
        plans.append(loaded.plan)
        train_step(loaded)

    trainer._train_step = remember  # type: ignore[method-assign]
    trainer.run()
    return plans


def _oracle(config: JobConfig, plans: list[StepPlan]) -> list[float]:
    store = TokenStore.open(config.data.stores[0])
    model_config = trained_model(config, store)
    model = Transformer(model_config).double()
    initialise_weights(model, layers=model_config.shape.layers, seed=config.training.seed)
    optimizer = build_optimizer(model, config.training)
    losses = []
    for step, plan in enumerate(plans, start=1):
        optimizer.zero_grad()
        loss_tokens, total = labelled_tokens(plan, store), 0.0
        for segment in plan.segments:
            batch = make_batch(MicroBatch((segment,), 0.0), store)
            attend = partial(segment_attention, segment_lengths=batch.segment_lengths, backend="reference")
            scores = model(batch.tokens, batch.positions, attend)
            loss = F.cross_entropy(scores, batch.labels, reduction="sum") / loss_tokens
            loss.backward()
            total += loss.item()
        _clip([weight.grad for weight in model.parameters() if weight.grad is not None], config.training.gradient_clip)
        set_learning_rate([optimizer], learning_rate(step, config.training))
        optimizer.step()
        losses.append(total)
    return losses


def _clip(gradients: list[torch.Tensor], largest: float) -> None:
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()  # torch's clip_grad_norm_ adds 1e-6 to it
    if norm > largest:
        for gradient in gradients:
            gradient *= largest / norm


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else ()) for name in LAYOUTS]
)
def test_twenty_steps_have_the_losses_of_single_documents(preset: str, folder: Path) -> None:
    config = check_job(configure(folder, preset), 1).config
    plans = run_ranks(config.parallel.world_size, _train, config)[0]
    losses = [row["loss"] for row in read_steps(folder / preset)]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(_oracle(config, plans), rel=1e-9)
