"""Biases, q/k norms, tied embeddings and scaled rotary positions in every kind of layout, against one process."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.training.distributed import run_ranks
from tests.training.documents import RandomDocuments
from tests.training.jobs import job, read_steps, trainer_of, write_store
from wlb.attention import segment_attention
from wlb.documents.segments import Segment
from wlb.job.config import JobConfig, TrainingConfig
from wlb.job.rope_scaling import RopeScalingConfig
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.packing.arrange import arrange
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.schedules.layout import Layout
from wlb.training.data.batch import labelled_tokens, make_batch
from wlb.training.data.loader import RankShare
from wlb.training.optimizer import build_optimizer, clip_gradients
from wlb.training.parallel.mesh import build_mesh
from wlb.training.parallel.parallelize import Execution, build_stage_modules
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.workload.shapes import ModelShape

SHAPE = ModelShape(hidden=14, layers=4, heads=4, kv_heads=2, head_dim=6, ffn_hidden=22, vocab_size=38)
TIED = TransformerConfig(
    SHAPE,
    qkv_bias=True,
    qk_norm=True,
    tied_embeddings=True,
    rope_scaling=RopeScalingConfig(factor=4.0, original_max_position_embeddings=16),
)
UNTIED = replace(
    TIED,
    tied_embeddings=False,
    o_bias=True,
    shape=replace(SHAPE, sliding_window=4, full_attention_layers=1),
    rope_scaling=RopeScalingConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
)
DOCUMENTS = RandomDocuments(np.array([17, 1, 17, 17]), SHAPE.vocab_size)
PLAN = StepPlan(0, (tuple(MicroBatch((Segment(d, 0, int(DOCUMENTS.lengths[d])),), 1.0) for d in range(4)),))
STEPS = 2
OPTIMISATION = TrainingConfig(learning_rate=0.02, gradient_clip=0.5)
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"tp": 2}, {"pp": 2}, {"cp": 2}],
    4: [{"pp": 2, "tp": 2}, {"pp": 4}, {"dp": 2, "pp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b"}],
}


def _alone(config: TransformerConfig) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradient norms of some steps, and the weights after them."""
    model = Transformer(config).double()
    initialise_weights(model, layers=SHAPE.layers, seed=0)
    optimizer = build_optimizer(model, OPTIMISATION)
    loss_tokens, found = labelled_tokens(PLAN, DOCUMENTS), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for micro_batch in PLAN.micro_batches:
            batch = make_batch(micro_batch, DOCUMENTS)
            attend = partial(segment_attention, segment_lengths=batch.segment_lengths)
            scores = model(batch.tokens, batch.positions, attend)
            loss = F.cross_entropy(scores, batch.labels, reduction="sum") / loss_tokens
            loss.backward()
            total += loss.item()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
        if norm > OPTIMISATION.gradient_clip:
            for gradient in gradients:
                gradient *= OPTIMISATION.gradient_clip / norm
        optimizer.step()
        found += [total, norm]
    return found, {name: weight.detach() for name, weight in model.named_parameters()}


def _in_layouts(config: TransformerConfig, layouts: list[Layout]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [_in_layout(config, parallel) for parallel in layouts]


def _in_layout(config: TransformerConfig, parallel: Layout) -> tuple[list[float], dict[str, Tensor]]:
    mesh, device, dtype = build_mesh(parallel, "cpu"), torch.device("cpu"), torch.float64
    stages = build_stage_modules(config, parallel, mesh, Execution(device, dtype), seed=0)
    runner = PipelineRunner(stages, parallel, mesh, len(PLAN.micro_batches) // parallel.dp, Execution(device, dtype))
    optimizers = [build_optimizer(stage, OPTIMISATION) for stage in stages]
    share = RankShare(mesh.rank("dp"), mesh.rank("cp"), parallel)
    plan = arrange(PLAN, parallel.dp)
    batches = [share.of(make_batch(micro_batch, DOCUMENTS)) for micro_batch in plan.ranks[share.dp_rank]]
    found = []
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = runner.run_step(batches, labelled_tokens(plan, DOCUMENTS))
        dist.all_reduce(loss)
        found += [loss.item(), clip_gradients(stages, OPTIMISATION.gradient_clip)]
        for optimizer in optimizers:
            optimizer.step()
    weights = {name: weight for stage in stages for name, weight in stage.named_parameters()}
    return found, {name: w.full_tensor().detach() for name, w in weights.items() if isinstance(w, DTensor)}


# Every layout once, and both kinds of head; the other two repeat them crosswise.
@pytest.mark.parametrize(
    ("world_size", "config"),
    [
        pytest.param(4, TIED, id="4-tied"),
        pytest.param(2, UNTIED, id="2-untied"),
        pytest.param(4, UNTIED, id="4-untied", marks=pytest.mark.exhaustive),
        pytest.param(2, TIED, id="2-tied", marks=pytest.mark.exhaustive),
    ],
)
def test_every_layout_trains_as_one_process_does(world_size: int, config: TransformerConfig) -> None:
    numbers, weights = _alone(config)
    layouts = [Layout(**layout) for layout in LAYOUTS[world_size]]
    assert {layout.world_size for layout in layouts} == {world_size}
    by_rank = run_ranks(world_size, _in_layouts, config, layouts)
    for layout, ranks in zip(layouts, zip(*by_rank, strict=True), strict=True):
        seen: dict[str, Tensor] = {}
        for found, held in ranks:
            assert found == pytest.approx(numbers, rel=1e-9), layout
            for name, weight in held.items():
                torch.testing.assert_close(weight, weights[name], rtol=1e-7, atol=1e-8)
                assert torch.equal(weight, seen.setdefault(name, weight)), (layout, name)  # every copy, to the last bit
        assert seen.keys() == weights.keys()


def _train(config: JobConfig) -> None:
    trainer_of(config).run()


def test_a_tied_model_continues_with_another_number_of_stages(tmp_path: Path) -> None:
    write_store(tmp_path / "store")

    def configure(name: str, pp: int, steps: int) -> JobConfig:
        return job(
            tmp_path,
            model={"tied_embeddings": True, "qk_norm": True},
            parallel={"pp": pp},
            training={"steps": steps, "decay_steps": 3, "dtype": "float64", "learning_rate": 0.01},
            checkpoint={"dir": str(tmp_path / name / "checkpoints"), "every": 1},
            metrics={"dir": str(tmp_path / name / "metrics")},
        )

    run_ranks(1, _train, configure("straight", pp=1, steps=3))
    shutil.copytree(tmp_path / "straight", tmp_path / "moved")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "moved" / "checkpoints" / f"step-{step:08d}")
    for pp, steps in ((2, 2), (1, 3)):
        run_ranks(pp, _train, configure("moved", pp, steps))
    straight, moved = ([row["loss"] for row in read_steps(tmp_path / name)] for name in ("straight", "moved"))
    assert moved == pytest.approx(straight, rel=1e-10)
