"""Everything that makes a plain ``Transformer`` parallel, applied from outside.

``build_mesh`` arranges the processes; ``build_stage_modules`` cuts the model into this rank's pipeline
stages, splits each over tensor-parallel ranks, shards what is left over all data- and context-parallel ranks with
FSDP2, and only then gives it memory and weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from wlb.config import ParallelConfig
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Block, Transformer, TransformerConfig
from wlb.schedules.layer_split import split_layers
from wlb.training.parallel.activation_checkpointing import Strategy, apply_activation_checkpointing
from wlb.training.parallel.compile import compile_blocks
from wlb.training.parallel.tensor_parallel import apply_tensor_parallel
from wlb.workload.shapes import ModelShape, check_divisible

MESH_DIMENSIONS = ("pp", "dp", "cp", "tp")


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


def build_mesh(parallel: ParallelConfig, device_type: str) -> JobMesh:
    """Arrange all processes as pp x dp x cp x tp, tensor-parallel ranks next to each other.

    The dimension that communicates most varies fastest, so it stays inside a node (WLB-LLM, section 2.1).
    """
    sizes = tuple(getattr(parallel, name) for name in MESH_DIMENSIONS)
    flattened = (parallel.pp, parallel.dp * parallel.cp, parallel.tp)
    return JobMesh(
        work=init_device_mesh(device_type, sizes, mesh_dim_names=MESH_DIMENSIONS),
        weights=init_device_mesh(device_type, flattened, mesh_dim_names=("pp", "dp_cp", "tp")),
    )


def check_layout(shape: ModelShape, parallel: ParallelConfig) -> None:
    """Raise ``UserError`` unless a model of ``shape`` can be cut and split as ``parallel`` asks."""
    split_layers(shape, parallel.stages)
    check_divisible(shape, parallel.tp)


def build_stage_modules(
    config: TransformerConfig,
    parallel: ParallelConfig,
    mesh: JobMesh,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int | None,
    activation_checkpointing: Strategy = "none",
    compiled: bool = False,
) -> list[Transformer]:
    """Build this rank's pipeline stages, sharded and initialised: ``pp_rank`` and every pp-th after it.

    Weights and optimizer state are float32, or float64 where ``dtype`` is; forward and backward run in
    ``dtype`` and gradients are reduced in the weights' type. Initial weights depend on ``seed`` alone; with None the
    memory is left as it is, for weights that are loaded.
    """
    splits = split_layers(config.shape, parallel.stages)
    modules = []
    for stage in range(mesh.rank("pp"), parallel.stages, parallel.pp):
        with torch.device("meta"):
            module = Transformer(config, splits[stage]).to(master_dtype(dtype))
        if parallel.tp > 1:
            apply_tensor_parallel(module, mesh.weights["tp"])
        if compiled:
            compile_blocks(module)
        apply_activation_checkpointing(module, activation_checkpointing)
        shard_weights(module, mesh.weights["dp_cp"], dtype, reshard_after_forward=parallel.pp == 1)
        module.to_empty(device=device)
        if seed is not None:
            initialise_weights(module, layers=config.shape.layers, seed=seed)
        modules.append(module)
    return modules


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of weights, their gradients and the loss when computing in ``dtype``: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def shard_weights(module: Transformer, mesh: DeviceMesh, dtype: torch.dtype, *, reshard_after_forward: bool) -> None:
    """Apply FSDP2, one unit per block and one for the rest; gradients are summed over ``mesh``, not averaged.

    The sum is what the loss needs: it is already divided by the token count of all ranks. A pipeline stage
    keeps its gathered weights over the whole step (``reshard_after_forward=False``), or every micro-batch
    would gather them anew.
    """
    # Inputs are not cast: embeddings and received activations have the right type, rotary angles their own.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=master_dtype(dtype), cast_forward_inputs=False)
    for unit in (*(child for child in module.modules() if isinstance(child, Block)), module):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        # Unless a plain sum is forced, even a factor of 1 becomes a premultiplied sum, which only NCCL has.
        unit.set_force_sum_reduction_for_comms(True)
