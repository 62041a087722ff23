"""Random numbers differ between ranks with different tokens or layers and agree between tensor-parallel ranks."""

from __future__ import annotations

import itertools

import torch

from tests.training.distributed import run_ranks
from wlb.config import ParallelConfig
from wlb.training.parallel.parallelize import build_mesh
from wlb.training.parallel.seeds import rank_seed, seed_this_rank


def _numbers(parallel: ParallelConfig) -> tuple[tuple[int, ...], list[float]]:
    mesh = build_mesh(parallel, "cpu")
    seed_this_rank(7, mesh)
    return tuple(map(mesh.rank, ("pp", "dp", "cp"))), torch.rand(3).tolist()


def test_tensor_parallel_ranks_alone_draw_the_same():
    found = run_ranks(4, _numbers, ParallelConfig(dp=2, tp=2), seconds=60.0)
    assert len({place for place, _ in found}) == 2
    for (place, numbers), (other_place, other) in itertools.combinations(found, 2):
        assert (numbers == other) == (place == other_place)


def test_every_place_and_seed_has_its_own():
    seeds = {rank_seed(*values) for values in itertools.product(range(4), repeat=4)}
    assert len(seeds) == 4**4
    assert rank_seed(3, 1, 2, 0) == rank_seed(3, 1, 2, 0)
