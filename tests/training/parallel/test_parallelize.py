"""What parallelising does to a model: sizes that are not supported, types, and memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.training.distributed import run_ranks
from wlb.config import ParallelConfig
from wlb.errors import UserError
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.training.parallel.parallelize import build_mesh, build_stage_modules, check_layout
from wlb.workload import ModelShape

CONFIG = TransformerConfig(
    ModelShape(hidden=14, layers=5, heads=4, kv_heads=2, head_dim=4, ffn_hidden=22, vocab_size=12)
)
LAYOUT = ParallelConfig(dp=2, pp=2, tp=2, virtual_pp=2, schedule="interleaved_1f1b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 6, "kv_heads": 3}, "kv_heads = 3 cannot be split over parallel.tp = 2"),
        ({"ffn_hidden": 21}, "ffn_hidden = 21 cannot be split over parallel.tp = 2"),
        ({"vocab_size": 13}, r"vocab_size = 13 .* or set model.vocab_size = 14"),
        ({"layers": 3}, "model has 3 layers, fewer than the 4 pipeline stages"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_layout(replace(CONFIG.shape, **changes), LAYOUT)


def _weights(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.dtype, int]]:
    """Of every parameter that this rank holds: its full value, its type, and how many values are stored here."""
    mesh = build_mesh(LAYOUT, "cpu")
    stages = build_stage_modules(CONFIG, LAYOUT, mesh, dtype=dtype, device=torch.device("cpu"), seed=4)
    held = {}
    for stage in stages:
        for name, weight in stage.named_parameters():
            assert isinstance(weight, DTensor)
            held[name] = (weight.full_tensor().detach(), weight.dtype, weight.to_local().numel())
    return held


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_layout_starts_from_the_same_weights_kept_in_full_precision(dtype: torch.dtype) -> None:
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    full = Transformer(CONFIG).to(kept)
    initialise_weights(full, layers=CONFIG.shape.layers, seed=4)
    by_rank = run_ranks(8, _weights, dtype)
    for name, weight in full.named_parameters():
        holders = [held[name] for held in by_rank if name in held]
        assert len(holders) == LAYOUT.dp * LAYOUT.tp, name
        assert all(torch.equal(value, weight) and stored == kept for value, stored, _ in holders), name
        copies = LAYOUT.tp if name.endswith("norm.weight") else 1
        assert sum(count for _, _, count in holders) == copies * weight.numel(), name


def _coordinates() -> tuple[int, ...]:
    mesh = build_mesh(ParallelConfig(cp=2, pp=2, tp=2), "cpu")
    return tuple(mesh.rank(name) for name in ("pp", "dp", "cp", "tp"))


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_ranks_far_apart() -> None:
    assert run_ranks(8, _coordinates) == list(product(range(2), range(1), range(2), range(2)))
