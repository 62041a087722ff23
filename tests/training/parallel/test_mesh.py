"""Places of ranks."""

import itertools

from tests.training.distributed import run_ranks
from wlb.schedules.layout import Layout
from wlb.training.parallel.mesh import build_mesh


def _coordinates() -> tuple[int, ...]:
    mesh = build_mesh(Layout(cp=2, pp=2, tp=2), "cpu")
    return tuple(mesh.rank(name) for name in ("pp", "dp", "cp", "tp"))


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_ranks_far_apart() -> None:
    assert run_ranks(8, _coordinates) == list(itertools.product(range(2), range(1), range(2), range(2)))
