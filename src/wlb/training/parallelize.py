"""Everything that makes a plain ``Transformer`` parallel, applied from outside.

``build_mesh`` arranges the processes; ``build_stage_modules`` cuts the model into this rank's pipeline
stages, shards each over data-parallel ranks with FSDP2, and only then gives them memory and weights. Every
rank takes the same path, also alone: a mesh dimension of size 1 is still a mesh dimension.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from wlb.config import ParallelConfig
from wlb.errors import UserError
from wlb.training.initialise import initialise_weights
from wlb.training.layer_split import split_layers
from wlb.training.model import Block, Transformer, TransformerConfig

MESH_DIMENSIONS = ("pp", "dp", "cp", "tp")


def build_mesh(parallel: ParallelConfig, device_type: str) -> DeviceMesh:
    """Arrange all processes as pp x dp x cp x tp, tensor-parallel ranks next to each other.

    The dimension that communicates most varies fastest, so it stays inside a node (WLB-LLM, section 2.1).
    Raises ``UserError`` for a dimension that is not available.
    """
    check_available(parallel)
    sizes = tuple(getattr(parallel, name) for name in MESH_DIMENSIONS)
    return init_device_mesh(device_type, sizes, mesh_dim_names=MESH_DIMENSIONS)


def check_available(parallel: ParallelConfig) -> None:
    """Raise ``UserError`` for a dimension that this version does not run."""
    for name in ("cp", "tp"):
        if getattr(parallel, name) > 1:
            raise UserError(
                f"parallel.{name} = {getattr(parallel, name)} is not available in this version; set parallel.{name} = 1"
            )


def build_stage_modules(
    config: TransformerConfig,
    parallel: ParallelConfig,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> list[Transformer]:
    """Build this rank's pipeline stages, sharded and initialised: ``pp_rank`` and every pp-th after it.

    Weights and optimizer state are float32, or float64 where ``dtype`` is; forward and backward run in
    ``dtype`` and gradients are reduced in the weights' type. Initial weights depend on ``seed`` alone.
    """
    splits = split_layers(config.shape, parallel.stages)
    modules = []
    for stage in range(mesh.get_local_rank("pp"), parallel.stages, parallel.pp):
        with torch.device("meta"):
            module = Transformer(config, splits[stage]).to(master_dtype(dtype))
        shard_over_data_parallel(module, mesh["dp"], dtype, reshard_after_forward=parallel.pp == 1)
        module.to_empty(device=device)
        initialise_weights(module, layers=config.shape.layers, seed=seed)
        modules.append(module)
    return modules


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of weights, their gradients and the loss when computing in ``dtype``: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def shard_over_data_parallel(
    module: Transformer, mesh: DeviceMesh, dtype: torch.dtype, *, reshard_after_forward: bool
) -> None:
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
