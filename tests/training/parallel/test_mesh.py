"""Places of ranks, and their random numbers: alike on tensor-parallel ranks, which hold the same tokens and layers."""

from __future__ import annotations

import itertools

import torch

from tests.training.distributed import run_ranks
from wlb.schedules.layout import Layout
from wlb.training.parallel.mesh import build_mesh, rank_seed, seed_this_rank


def _numbers(parallel: Layout) -> tuple[tuple[int, ...], list[float]]:
    mesh = build_mesh(parallel, "cpu")
    seed_this_rank(7, mesh)
    return tuple(map(mesh.rank, ("pp", "dp", "cp"))), torch.rand(3).tolist()


def test_tensor_parallel_ranks_alone_draw_the_same():
    found = run_ranks(4, _numbers, Layout(dp=2, tp=2))
    assert len({place for place, _ in found}) == 2
    for (place, numbers), (other_place, other) in itertools.combinations(found, 2):
        assert (numbers == other) == (place == other_place)


def test_every_place_and_seed_has_its_own():
    seeds = {rank_seed(*values) for values in itertools.product(range(4), repeat=4)}
    assert len(seeds) == 4**4
    assert rank_seed(3, 1, 2, 0) == rank_seed(3, 1, 2, 0)


def _coordinates() -> tuple[int, ...]:
    mesh = build_mesh(Layout(cp=2, pp=2, tp=2), "cpu")
    return tuple(mesh.rank(name) for name in ("pp", "dp", "cp", "tp"))


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_ranks_far_apart() -> None:
    assert run_ranks(8, _coordinates) == list(itertools.product(range(2), range(1), range(2), range(2)))
