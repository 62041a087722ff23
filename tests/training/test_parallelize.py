"""What parallelising does to a model: sizes that are not supported, types, and memory."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.training.distributed import run_ranks
from wlb.config import ParallelConfig
from wlb.errors import UserError
from wlb.training.initialise import initialise_weights
from wlb.training.model import Transformer, TransformerConfig
from wlb.training.parallelize import build_mesh, build_stage_modules
from wlb.workload import ModelShape

CONFIG = TransformerConfig(
    ModelShape(hidden=14, layers=5, heads=2, kv_heads=1, head_dim=4, ffn_hidden=19, vocab_size=11)
)
INTERLEAVED = ParallelConfig(dp=2, pp=2, virtual_pp=2, schedule="interleaved_1f1b")


@pytest.mark.parametrize("name", ["cp", "tp"])
def test_dimensions_that_are_not_supported_yet_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"parallel\.{name} = 2 is not available in this version; set parallel"):
        build_mesh(ParallelConfig.model_validate({name: 2}), "cpu")


def _weights(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.dtype, int]]:
    """Of every parameter that this rank holds: its full value, its type, and how many values are stored here."""
    mesh = build_mesh(INTERLEAVED, "cpu")
    stages = build_stage_modules(CONFIG, INTERLEAVED, mesh, dtype=dtype, device=torch.device("cpu"), seed=4)
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
    by_rank = run_ranks(4, _weights, dtype)
    for name, weight in full.named_parameters():
        holders = [held[name] for held in by_rank if name in held]
        assert len(holders) == INTERLEAVED.dp, name
        assert all(torch.equal(value, weight) and stored == kept for value, stored, _ in holders), name
        assert sum(count for _, _, count in holders) == weight.numel(), name


def _coordinates() -> list[int]:
    mesh = build_mesh(ParallelConfig(dp=2, pp=2), "cpu")
    return [mesh.get_local_rank(name) for name in ("pp", "dp")]


def test_data_parallel_ranks_are_neighbours_and_pipeline_ranks_far_apart() -> None:
    assert run_ranks(4, _coordinates) == [[0, 0], [0, 1], [1, 0], [1, 1]]
