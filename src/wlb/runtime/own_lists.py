"""The micro-batches of one rank, and the forward and backward passes over them.

In a level step every rank runs its own number of micro-batches, and all finish together. Ranks synchronise in three
places only: inside a micro-batch that they share, when weights are gathered at the start of the step, and when
gradients are reduced. FSDP2 reduces them after the last backward, because inside it a rank would wait in every layer
for the ranks that are not there yet; DDP beside the last backward. Two rules prevent deadlocks. Ranks run the
micro-batches that they share in the order of the plan, and the last one of a rank is the last of all that share it.

This file and ``stage`` use private parts of FSDP2, the same in torch 2.11 to 2.14: the parameter groups of a module,
``post_backward`` of a group, which adds up gradients and reduces them, and the end of a backward of the root module.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, UnshardHandle
from torch.nn.parallel import DistributedDataParallel

from wlb.errors import UserError
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.runtime.calibration import Calibration
from wlb.runtime.collectives import gathered_rows, warn
from wlb.runtime.environment import set_up_gpu

T = TypeVar("T")
Measuring = Callable[[str, int], AbstractContextManager[object]]  # of (phase, micro-batch)

_MEASURED = WeakSet[nn.Module]()  # models whose memory has been compared with that of the GPU
_CHECKED = WeakSet[DistributedDataParallel]()  # whose first step was right


def names_ranks(plan: StepPlan) -> bool:
    """Whether micro-batches of ``plan`` name the context-parallel ranks that run them, as in level steps."""
    return any(micro_batch.ranks for micro_batch in plan.micro_batches)


def own_batches(plan: StepPlan, dp_rank: int, cp_rank: int, read: Callable[[MicroBatch], T]) -> tuple[T, ...]:
    """The result of ``read`` for each micro-batch of ``plan`` that a rank runs, in order; others are not read.

    ``MicroBatch.ranks`` of the context-parallel group share one, and ``read`` returns the part of this rank.

    In a level step under DDP a rank reduces its gradients beside the backward of its last micro-batch, and a reduction
    waits for all other ranks. So no other rank may still need it. If its last micro-batch is not the last of all ranks
    that share it, the list ends with an empty micro-batch (``make_batch`` makes it a single unlabelled token). FSDP2
    reduces later, so ``in_turn`` leaves it out.
    """
    mine = plan.ranks[dp_rank]
    if names_ranks(plan):
        last = {rank: micro_batch for micro_batch in mine for rank in micro_batch.ranks}
        mine = tuple(micro_batch for micro_batch in mine if cp_rank in micro_batch.ranks)
        if not mine or any(last[rank] is not mine[-1] for rank in mine[-1].ranks):
            mine += (MicroBatch((), 0.0, (cp_rank,)),)
    return tuple(map(read, mine))


def level_step(
    model: nn.Module, batches: Sequence[T], loss_fn: Callable[[T], Tensor], calibration: Calibration | None = None
) -> Tensor:
    """Run forward and backward of the ``batches`` of this rank; accumulate gradients and reduce them once, at the end.

    Every rank calls this once per step, with its own batches, and steps its optimizer afterwards. FSDP2 weights stay
    gathered for the whole step. A parameter needs a gradient on all ranks or on none. Under DDP the last batch of a
    rank must use every parameter that any batch used, because its backward reduces the gradients.

    Args:
        model: Holds DDP (``DistributedDataParallel``, ``replicate``) or FSDP2 units (``fully_shard``).
        batches: At least one. Ranks may have different numbers.
        loss_fn: Runs ``model`` on a batch and returns the loss of the batch as part of the step, a scalar
            (``PackedBatch.loss(logits)``). It must not call other collectives, so gather a second FSDP2 model before.
        calibration: Times the batches, if given.

    Returns:
        The sum of the losses, detached. Over all ranks it adds up to the loss of the step, times the number of ranks
        if ``loss_fn`` scales for averaged gradients.

    Raises:
        UserError: There are no batches, ``loss_fn`` returns no scalar tensor, or gradients would stay on this rank:
            several processes train a model without DDP or FSDP2, or ``loss_fn`` calls the module inside DDP. Also
            for FSDP1, which gathers weights in every micro-batch and would deadlock, and for ``static_graph`` of DDP.
    """
    if not isinstance(batches, Sequence) or not batches:
        found = "empty" if isinstance(batches, Sequence) else f"a {type(batches).__name__}"
        raise UserError(f"batches are {found}, not a list of at least one; give step.batches")
    warn_of_memory(model)
    losses = run_batches(model, batches, loss_fn, calibration=calibration)
    if calibration is not None:
        calibration.end_step()
    return torch.stack(losses).sum()


def run_batches(
    model: nn.Module,
    batches: Sequence[T],
    loss_fn: Callable[[T], Tensor],
    *,
    keep_weights: bool = True,
    calibration: Calibration | None = None,
    measuring: Measuring = lambda phase, micro_batch: nullcontext(),
) -> list[Tensor]:
    """Forward and backward of ``batches`` (``in_turn``); returns their losses, detached."""
    losses = []
    for index, batch in enumerate(in_turn(model, batches, keep_weights=keep_weights, calibration=calibration)):
        with measuring("forward", index):
            loss = loss_fn(batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"loss_fn returned a {found}, not a scalar tensor; return batch.loss(logits)")
        with measuring("backward", index):
            loss.backward()
        losses.append(loss.detach())
    return losses


def warn_of_memory(model: nn.Module) -> None:
    """Say so, once for each ``model``, if a level step holds more weights and gradients than this GPU has free."""
    if model in _MEASURED or not torch.cuda.is_available():
        return
    _MEASURED.add(model)
    weights, gradients = (size / 1e9 for size in unsharded_bytes(model))
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if weights + gradients > free / 1e9:
        held = f"{weights:.1f} GB of gathered weights and {gradients:.1f} GB of unsharded gradients"
        remedy = "leave out own_lists, or choose a smaller reduce_dtype in MixedPrecisionPolicy"
        warn(f"a level step holds {held}, and this GPU has {free / 1e9:.1f} GB free; {remedy}")


def unsharded_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of the FSDP2 weights of ``model`` once gathered, and of their gradients until they are reduced."""
    weights = gradients = 0
    for unit in fsdp_units(model):
        policy = unit._get_fsdp_state()._mp_policy
        for group in _parameter_groups(unit):
            for parameter in group.fsdp_params:
                count, sharded = parameter._orig_size.numel(), parameter.sharded_param
                kind = policy.param_dtype or sharded.dtype
                weights += count * kind.itemsize
                gradients += count * (policy.reduce_dtype or kind).itemsize * sharded.requires_grad
    return weights, gradients


def in_turn(
    model: nn.Module, batches: Sequence[T], *, keep_weights: bool = True, calibration: Calibration | None = None
) -> Generator[T]:
    """Yield each of ``batches`` with ``model`` set to accumulate gradients, and reduce them once.

    ``calibration`` times the work of the caller on all batches but the first and last, in which ranks wait for each
    other. With ``keep_weights`` FSDP2 weights are gathered before the first batch and kept, and gradients are reduced
    after the last batch: ask for one more. Otherwise every batch gathers weights block by block, which needs equally
    many batches on all ranks, and the last backward reduces gradients. Raises ``UserError`` as ``level_step`` does.
    """
    set_up_gpu()
    units, wrapped, replicated = fsdp_units(model), *_data_parallel(model, batches, keep_weights)
    if keep_weights:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
        for handle in gather_weights(model):
            handle.wait()
        if units and len(batches) > 1 and getattr(batches[-1], "is_empty", False):  # for DDP (``own_batches``)
            batches = batches[:-1]
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        for unit in units:
            _set_reducing(unit, is_last and not keep_weights)
        for module in replicated:
            module.set_requires_gradient_sync(is_last)
        with ExitStack() as local:
            for module in wrapped if not is_last else ():
                local.enter_context(module.no_sync())
            if calibration is not None and index > 0 and not is_last:
                local.enter_context(calibration.timing(batch))
            yield batch
    if keep_weights:
        reduce_gradients(model)
    for module in wrapped:
        _check_reduced(module)


def _data_parallel(
    model: nn.Module, batches: Sequence[Any], keep_weights: bool
) -> tuple[list[DistributedDataParallel], list[Any]]:
    """The modules in ``model`` with DDP, and those with ``replicate``. Raises ``UserError`` if none can accumulate."""
    modules = [*model.modules()]
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise UserError("FSDP1 gathers weights in every micro-batch, so level steps would deadlock; use fully_shard")
    wrapped = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if any(module.static_graph for module in wrapped) and (keep_weights or len(batches) > 1):
        raise UserError("static_graph = True of DDP does not accumulate gradients; leave it out")
    reducing = [module for module in modules if hasattr(module, "set_requires_gradient_sync")]
    world, told = dist.get_world_size() if dist.is_initialized() else 1, getattr(batches[0], "ranks", None)
    ranks = told if isinstance(told, int) else world  # of a ``PackedBatch``
    if not wrapped and not reducing and min(ranks, world) > 1:
        needed = "give the model that DDP returned, or call fully_shard on it"
        raise UserError(f"{type(model).__name__} is on {ranks} processes, and nothing reduces its gradients; {needed}")
    return wrapped, [module for module in reducing if not isinstance(module, FSDPModule)]


def _check_reduced(module: DistributedDataParallel) -> None:
    """Raise ``UserError`` if ranks have different gradients after the first step of ``module``."""
    if module in _CHECKED:
        return
    _CHECKED.add(module)
    reduced = [w for name, w in module.module.named_parameters() if name not in module.parameters_to_ignore]
    gradients = [w.grad.detach() for w in reduced if w.grad is not None and w.grad.layout == torch.strided]
    norm = torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0
    device = next(module.parameters()).device
    norms = gathered_rows([norm], torch.float64, device, module.process_group)
    if not torch.allclose(norms, norms[:1], rtol=1e-6, atol=0.0, equal_nan=True):
        raise UserError("DDP did not reduce the gradients; call the model that it returned, not the module inside it")


def reduce_gradients(model: nn.Module) -> None:
    """Reduce the gradients that the FSDP2 units in ``model`` have accumulated, and free their gathered weights.

    All ranks call it after their last backward. Until then a rank holds gradients of all its weights.
    """
    units = fsdp_units(model)
    for unit in units:
        _set_reducing(unit, True)
    for unit in reversed(units):
        end_backward(unit)
    _end_backward_of_all(units)


def _end_backward_of_all(units: Sequence[FSDPModule]) -> None:
    """What FSDP2 does after a backward: wait for reductions, and be ready for a forward."""
    states: list[Any] = [unit._get_fsdp_state() for unit in reversed(units)]
    outermost = {id(state._state_ctx): state for state in states}  # of those that share it, the last
    for state in outermost.values():
        state._state_ctx.manual_backward_finalization_active = False  # torch 2.15 reads it, and sets it in a backward
        state._root_post_backward_final_callback()
        state._state_ctx.manual_backward_finalization_active = None


def end_backward(unit: FSDPModule) -> None:
    """Add the gradients of a backward to those in the type of the reduction, and reduce them if ``unit`` is set to."""
    for group in _parameter_groups(unit):
        group.post_backward()


def complete_gradients(unit: FSDPModule) -> None:
    """Give zero gradients to parameters of ``unit`` that had no backward on this rank, because other ranks had one."""
    for group in _parameter_groups(unit):
        for param in group.fsdp_params:
            weight = param.unsharded_param
            if weight.requires_grad and weight.grad is None and param.unsharded_accumulated_grad is None:
                weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)  # from torch 2.15 on the reduction's
    end_backward(unit)


def _parameter_groups(unit: FSDPModule) -> list[Any]:
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]  # a unit without parameters of its own has none


def _set_reducing(unit: FSDPModule, reduces: bool) -> None:
    """Whether the next backward of ``unit`` reduces gradients and frees its weights."""
    unit.set_is_last_backward(reduces)
    unit.set_reshard_after_backward(reduces, recurse=False)
    unit.set_requires_gradient_sync(reduces, recurse=False)


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """The modules of ``model`` whose weights FSDP2 gathers, in the order of a forward."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gather_weights(model: nn.Module) -> list[UnshardHandle]:
    """Start gathering all weights that FSDP2 has sharded, without the gradients that a step that failed has left there.

    If ranks gathered each layer in their own forward, one could wait there for another that waits for it in a shared
    micro-batch. A pipeline stage gathers while its first micro-batch is still on other stages. Returns what to wait for
    if the model may have units that no forward uses, whose first backward would fail; empty after the first step.
    """
    units = fsdp_units(model)
    params = [param for unit in units for group in _parameter_groups(unit) for param in group.fsdp_params]
    is_first = not all(hasattr(param, "_unsharded_param") for param in params)
    for unit in units:
        _set_reducing(unit, False)
    if not is_first:
        _end_backward_of_all(units)
        for param in params:
            param.unsharded_param.grad = None
            if "unsharded_accumulated_grad" in vars(param):  # before torch 2.15
                param.unsharded_accumulated_grad = None
    handles = []
    for unit in units:
        unit.reshard()  # an evaluation before the optimizer's step may have left old weights gathered
        handles.append(unit.unshard(async_op=True))
    return [handle for handle in handles if is_first and handle is not None]
