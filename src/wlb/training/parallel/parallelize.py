"""Parallel training of a plain ``Transformer``, applied from outside.

``build_stage_modules`` cuts the model into this rank's pipeline stages, splits each over tensor-parallel ranks, divides
its experts over expert-parallel ranks, compiles and recomputes its blocks, shards it over all data- and
context-parallel ranks with FSDP2, and only then allocates memory and fills in weights. Parameters keep their names from
the plain model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from wlb.attention.packed_attention import AttentionCache
from wlb.models.experts import mixtures
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Block, Transformer, TransformerConfig
from wlb.schedules.layout import Layout, split_layers
from wlb.training.parallel.mesh import JobMesh
from wlb.training.parallel.tensor_parallel import apply_tensor_parallel
from wlb.workload.base import Checkpointing

_BlockForward = Callable[..., Tensor]  # of (x_TD, rotation, attend, routing)


@dataclass(frozen=True)
class Execution:
    """Where forward and backward passes run, and in which type."""

    device: torch.device
    dtype: torch.dtype


def build_stage_modules(
    config: TransformerConfig,
    layout: Layout,
    mesh: JobMesh,
    execution: Execution,
    *,
    seed: int | None,
    activation_checkpointing: Checkpointing = "none",
    compiled: bool = False,
) -> list[Transformer]:
    """Build this rank's pipeline stages, sharded and initialised: stage ``pp_rank`` and every pp-th after it.

    If the output head is dealt, the first of them holds this rank's copy, if it has one.
    Weights, optimizer state and reduced gradients have the ``master_dtype``. Initial weights depend on ``seed`` alone;
    with None the memory stays uninitialised, for weights that will be loaded.
    """
    splits = split_layers(config.shape, layout)
    modules = []
    for stage in range(mesh.rank("pp"), layout.stages, layout.pp):
        with torch.device("meta"):
            heads = (stage in layout.head_stages) * len(layout.head_stages) if layout.deals_head else None
            module = Transformer(config, splits[stage], dealt_heads=heads).to(master_dtype(execution.dtype))
        if layout.tp > 1:
            apply_tensor_parallel(module, mesh.work["tp"])
        if (ranks := mesh.experts and mesh.experts["ep"]) is not None:
            for mixture in mixtures([module]).values():
                mixture.group = ranks.get_group()
                for name, weight in [*mixture.experts.named_parameters()]:
                    setattr(mixture.experts, name, nn.Parameter(distribute_tensor(weight, ranks, [Shard(0)])))
        if compiled:
            compile_blocks(module)
        apply_activation_checkpointing(module, activation_checkpointing)
        shard_weights(module, mesh, execution.dtype, reshard_after_forward=not layout.keeps_weights)
        module.to_empty(device=execution.device)
        for mixture in mixtures([module]).values():
            mixture.reset_state()
        if seed is not None:
            initialise_weights(module, layers=config.shape.layers, seed=seed)
        modules.append(module)
    return modules


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of weights, their gradients and the loss when computing in ``dtype``: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def compile_blocks(module: Transformer, backend: str = "inductor") -> None:
    """Compile every block of ``module`` when it first runs; call it before ``apply_activation_checkpointing``.

    The token count is dynamic, so a block is compiled for its first micro-batch only, except that PyTorch may compile
    once more for a length of 1 and for one that equals a width of the model. Attention is not compiled, because its
    runs and exchanges follow from each plan. ``backend`` is one of ``torch.compile``.
    """
    for block in _blocks(module):
        block.forward = _compiled(block.forward, backend)  # type: ignore[method-assign]


def _compiled(forward: _BlockForward, backend: str) -> _BlockForward:
    compiled = torch.compile(forward, backend=backend, dynamic=True)

    @wraps(forward)
    def run(x_TD: Tensor, rotation: Any, attend: Callable[..., Tensor], *routing: Any) -> Tensor:
        if type(x_TD) is not Tensor:
            # A tensor-parallel collective may still be filling it. Compiled code (torch 2.13) would run on it and give
            # a wrong gradient; a copy is complete.
            x_TD = x_TD.clone()
        out: Tensor = compiled(x_TD, rotation, torch.compiler.disable(attend), *routing)
        return out

    return run


def apply_activation_checkpointing(module: Transformer, kind: Checkpointing) -> None:
    """Make every block of ``module`` keep less between forward and backward; call it before ``shard_weights``.

    Under ``full`` it keeps its input only and is computed a second time right before its backward pass. Under
    ``keep_attention`` it also keeps the results of attention (``AttentionCache``; Korthikanti et al., arXiv 2205.05198,
    section 5, recompute attention instead, whose scores flash attention never stores). ``docs/simulation.md`` lists
    what each keeps. Only the block's ``forward`` is replaced, so FSDP's and tensor-parallel hooks stay around it.
    """
    if kind == "none":
        return
    for block in _blocks(module):
        block.forward = _recomputed(block.forward, keep_attention=kind == "keep_attention")  # type: ignore[method-assign]


def _recomputed(forward: _BlockForward, *, keep_attention: bool) -> _BlockForward:
    @wraps(forward)
    def run(x_TD: Tensor, rotation: Any, attend: Callable[..., Tensor], *routing: Any) -> Tensor:
        attend = partial(attend, cache=AttentionCache(computed_again=not keep_attention))
        # There is no dropout, so no random state that the second pass would have to find again.
        out: Tensor = checkpoint(
            forward, x_TD, rotation, attend, *routing, use_reentrant=False, preserve_rng_state=False
        )
        return out

    return run


def shard_weights(module: Transformer, mesh: JobMesh, dtype: torch.dtype, *, reshard_after_forward: bool) -> None:
    """Apply FSDP2, one unit per block and one for the rest; gradients are summed over ranks, not averaged.

    They are summed because the loss is already divided by the token count of all ranks. Experts that are divided over
    ranks are units of their own, sharded over those ranks that hold the same. Without ``reshard_after_forward``
    gathered weights stay for the whole step.
    """
    # Inputs are not cast: embeddings and received activations have the right type, and rotary angles have their own.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=master_dtype(dtype), cast_forward_inputs=False)
    units: list[tuple[nn.Module, DeviceMesh]] = [(unit, mesh.weights) for unit in (*_blocks(module), module)]
    if mesh.experts is not None:
        units = [(mixture.experts, mesh.experts["efsdp"]) for mixture in mixtures([module]).values()] + units
    for unit, ranks in units:
        fully_shard(unit, mesh=ranks, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        # Without this, even a factor of 1 becomes a premultiplied sum, which only NCCL has.
        unit.set_force_sum_reduction_for_comms(True)


def _blocks(module: Transformer) -> list[Block]:
    return cast(list[Block], list(module.layers.values()))
