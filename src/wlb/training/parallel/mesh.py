"""The processes of a job, arranged as pp x dp x cp x tp, and the rank of each in every dimension."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wlb.schedules.layout import Layout


@dataclass(frozen=True)
class JobMesh:
    """All processes of a job, pp x dp x cp x tp.

    Weights are sharded over ``weights``, which joins dp and cp into one dimension, because context-parallel ranks see
    different tokens and the same weights, just as data-parallel ranks do. Under expert parallelism ``experts`` has the
    same processes as pp x efsdp x ep: experts are divided over ep, and the weights of each sharded over efsdp. If this
    process has a dealt head, ``heads`` are the processes that differ from it in ``pp`` only and have one too.
    """

    work: DeviceMesh
    weights: DeviceMesh
    experts: DeviceMesh | None = None
    heads: dist.ProcessGroup | None = None

    def rank(self, dimension: str) -> int:
        """This process's rank in a dimension of ``work``."""
        return self.work.get_local_rank(dimension)

    def group(self, dimension: str) -> dist.ProcessGroup:
        """The processes that differ from this one in ``dimension`` only."""
        return self.work.get_group(dimension)


def build_mesh(layout: Layout, device_type: str) -> JobMesh:
    """Arrange all processes as pp x dp x cp x tp, tensor-parallel ranks next to each other; cp is the size of pools.

    The dimension that communicates most varies fastest, so it stays inside a node (WLB-LLM, section 2.1).
    """
    shape = layout.pp, layout.pools, layout.pool_size, layout.tp
    work = init_device_mesh(device_type, shape, mesh_dim_names=("pp", "dp", "cp", "tp"))
    experts = None
    if layout.ep > 1:
        sizes = layout.pp, layout.dp_cp * layout.tp // layout.ep, layout.ep
        experts = init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "efsdp", "ep"))
    heads = None
    if layout.deals_head:
        ranks = dist.get_process_group_ranks(work.get_group("pp"))
        dealt = [ranks[rank] for rank in layout.head_stages]
        # A rank without a head makes a group of its own: members find each other by how many groups each has made.
        members = dealt if dist.get_rank() in dealt else [dist.get_rank()]
        group = dist.new_group(members, use_local_synchronization=True)
        heads = group if len(members) > 1 else None
    mesh = JobMesh(work, work["dp", "cp"]._flatten("dp_cp"), experts, heads)
    # NCCL sets up a group in its first call, in which all ranks must take part. In a step it might be an exchange among
    # some of them, or of ranks that wait for each other elsewhere, so every group makes it here.
    sharded = [mesh.weights.get_group()] + ([experts.get_group(name) for name in ("efsdp", "ep")] if experts else [])
    for group in [dist.group.WORLD, *sharded, *map(mesh.group, ("cp", "pp", "tp")), *([heads] if heads else [])]:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(torch.zeros(1, device=device_type), group=group)
    return mesh
