"""The processes of a job, arranged as they divide the work and the weights, and the place of each in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wlb.schedules.layout import Layout

MESH_DIMENSIONS = ("pp", "dp", "cp", "tp")
_RANDOM_DIMENSIONS = ("pp", "dp", "cp")


@dataclass(frozen=True)
class JobMesh:
    """All processes of a job, arranged twice: as they divide the work, and as they divide the weights.

    ``work`` is pp x dp x cp x tp. In ``weights`` dp and cp are one dimension, "dp_cp": context-parallel ranks see
    different tokens and the same weights, just as data-parallel ranks do.
    """

    work: DeviceMesh
    weights: DeviceMesh

    def rank(self, dimension: str) -> int:
        """This process's place in a dimension of ``work``."""
        return self.work.get_local_rank(dimension)

    def size(self, dimension: str) -> int:
        return self.work[dimension].size()

    def group(self, dimension: str) -> dist.ProcessGroup:
        """The processes that differ from this one in ``dimension`` only."""
        return self.work.get_group(dimension)


def build_mesh(layout: Layout, device_type: str) -> JobMesh:
    """Arrange all processes as pp x dp x cp x tp, tensor-parallel ranks next to each other.

    The dimension that communicates most varies fastest, so it stays inside a node (WLB-LLM, section 2.1).
    """
    flattened = (layout.pp, layout.dp * layout.cp, layout.tp)
    mesh = JobMesh(
        work=init_device_mesh(device_type, mesh_shape(layout), mesh_dim_names=MESH_DIMENSIONS),
        weights=init_device_mesh(device_type, flattened, mesh_dim_names=("pp", "dp_cp", "tp")),
    )
    # NCCL sets up a group in its first call, for which all of its ranks must be there. That of a context-parallel group
    # may be an exchange of only some of them; that of a pipeline group, the sum of tied embeddings on its two ends.
    for dimension in ("cp", "pp"):
        if mesh.size(dimension) > 1:
            dist.all_reduce(torch.zeros(1, device=device_type), group=mesh.group(dimension))
    return mesh


def mesh_shape(layout: Layout) -> tuple[int, ...]:
    """The sizes of ``MESH_DIMENSIONS``."""
    return tuple(getattr(layout, name) for name in MESH_DIMENSIONS)


def seed_this_rank(seed: int, mesh: JobMesh) -> None:
    """Seed PyTorch's generators, of the CPU and of every GPU, with ``training.seed`` and the rank's place.

    Initial weights do not depend on them (``initialise``), nor does the order of documents, and the model has no
    dropout: they are there for what a user adds to it. Such randomness has to differ between ranks that hold different
    tokens or layers, and to be the same on tensor-parallel ranks, which compute the same activations together.
    """
    torch.manual_seed(rank_seed(seed, *map(mesh.rank, _RANDOM_DIMENSIONS)))


def rank_seed(seed: int, pp_rank: int, dp_rank: int, cp_rank: int) -> int:
    """A seed for tensor-parallel ranks with this place; it depends on nothing else, such as the sizes of the job."""
    (word,) = np.random.SeedSequence([seed, pp_rank, dp_rank, cp_rank]).generate_state(1, np.uint64)
    return int(word)
