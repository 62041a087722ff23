"""Places of ranks."""

import itertools

import torch.distributed as dist

from tests.training.distributed import run_ranks
from wlb.schedules.layout import Layout
from wlb.training.parallel.mesh import build_mesh


def _coordinates() -> tuple[int, ...]:
    mesh = build_mesh(Layout(cp=2, pp=2, tp=2), "cpu")
    return tuple(mesh.rank(name) for name in ("pp", "dp", "cp", "tp"))


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_ranks_far_apart() -> None:
    assert run_ranks(8, _coordinates) == list(itertools.product(range(2), range(1), range(2), range(2)))


def _heads_of_meshes() -> list[list[int]]:
    """The ranks with heads that reduce their gradients with this one, in one mesh after another."""
    meshes = [build_mesh(Layout(pp=pp, dp=4 // pp, head="dealt"), "cpu") for pp in (4, 2)]
    return [dist.get_process_group_ranks(mesh.heads) if mesh.heads else [] for mesh in meshes]


def test_ranks_without_a_head_make_as_many_groups_as_the_others():
    assert run_ranks(4, _heads_of_meshes) == [
        [[], [0, 2]],
        [[1, 2, 3], [1, 3]],
        [[1, 2, 3], [0, 2]],
        [[1, 2, 3], [1, 3]],
    ]
