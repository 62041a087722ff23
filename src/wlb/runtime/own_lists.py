"""The micro-batches of one rank, and the forward and backward passes over them.

In a level step every rank runs its own number of micro-batches, and all finish together. Several ranks share the
micro-batches of long documents. So ranks synchronise in three places only: inside a shared micro-batch, when weights
are gathered at the start of the step, and when gradients are reduced in the backward of the last micro-batch. Two rules
prevent deadlocks. Ranks run the micro-batches that they share in the order of the plan, and the last micro-batch of a
rank is the last of every rank that shares it (``own_micro_batches``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from wlb.errors import UserError
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.runtime.calibration import Calibration

T = TypeVar("T")


def names_ranks(plan: StepPlan) -> bool:
    """Whether micro-batches of ``plan`` name the context-parallel ranks that run them, as in level steps."""
    return any(micro_batch.ranks for micro_batch in plan.micro_batches)


def own_micro_batches(plan: StepPlan, dp_rank: int, cp_rank: int) -> list[MicroBatch]:
    """The micro-batches of ``plan`` that a rank runs, in order.

    In a level step a rank reduces its gradients in the backward of its last micro-batch, layer by layer, and waits
    there for all other ranks. So no other rank may still need it. If its last micro-batch is not the last of all ranks
    that share it, the list ends with an empty micro-batch (``make_batch`` makes it a single unlabelled token).
    """
    micro_batches = plan.ranks[dp_rank]
    if not names_ranks(plan):
        return list(micro_batches)
    mine = [micro_batch for micro_batch in micro_batches if cp_rank in micro_batch.ranks]
    last = {rank: micro_batch for micro_batch in micro_batches for rank in micro_batch.ranks}
    if not mine or any(last[rank] is not mine[-1] for rank in mine[-1].ranks):
        mine.append(MicroBatch((), 0.0, (cp_rank,)))
    return mine


def own_batches(plan: StepPlan, dp_rank: int, cp_rank: int, read: Callable[[MicroBatch], T]) -> tuple[T, ...]:
    """The result of ``read`` for each of ``own_micro_batches``; other micro-batches are not read.

    ``read`` returns the part of this rank in a micro-batch, which ``MicroBatch.ranks`` of the context-parallel group
    share.
    """
    return tuple(read(micro_batch) for micro_batch in own_micro_batches(plan, dp_rank, cp_rank))


def level_step(
    model: nn.Module, batches: Sequence[T], loss_fn: Callable[[T], Tensor], calibration: Calibration | None = None
) -> Tensor:
    """Run forward and backward of the ``batches`` of this rank; accumulate gradients and reduce them once, at the end.

    Every rank calls this once per step, with its own batches, and steps its optimizer afterwards. FSDP2 weights are
    gathered at the start and stay gathered until the last backward. The last batch of a rank must run through every
    FSDP or DDP unit that any batch used, because it reduces the gradients.

    Args:
        model: Holds DDP (``DistributedDataParallel``, ``replicate``) or FSDP2 units (``fully_shard``). Gradients of a
            module without either stay on this rank.
        batches: At least one. Ranks may have different numbers.
        loss_fn: Runs ``model`` on a batch and returns the loss of the batch as part of the step, a scalar
            (``PackedBatch.loss(logits)``). It must not call other collectives, so gather a second FSDP2 model before.
        calibration: ``PackedSteps.calibration`` times the batches, if given.

    Returns:
        The sum of the losses, detached. Over all ranks it adds up to the loss of the step, times the number of ranks
        if ``loss_fn`` scales for averaged gradients.

    Raises:
        UserError: There are no batches, ``loss_fn`` returns no scalar tensor, or the model is wrapped by FSDP1, which
            gathers weights in every micro-batch and would deadlock.
    """
    losses = []
    if not isinstance(batches, Sequence) or not batches:
        found = "empty" if isinstance(batches, Sequence) else f"a {type(batches).__name__}"
        raise UserError(f"batches are {found}, not a list of at least one; give step.batches")
    for batch in in_turn(model, batches, calibration=calibration):
        loss = loss_fn(batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"loss_fn returned a {found}, not a scalar tensor; return batch.loss(logits)")
        loss.backward()
        losses.append(loss.detach())
    if calibration is not None:
        calibration.end_step()
    return torch.stack(losses).sum()


def in_turn(
    model: nn.Module, batches: Sequence[T], *, keep_weights: bool = True, calibration: Calibration | None = None
) -> Iterator[T]:
    """Yield each of ``batches`` with ``model`` set to reduce gradients in the backward of the last one only.

    ``calibration`` times the work of the caller on all batches but the first and last, in which ranks wait for each
    other. With ``keep_weights`` FSDP2 weights are gathered before the first batch and kept. Otherwise every batch
    gathers them block by block, which needs equally many batches on all ranks.
    """
    modules, units = [*model.modules()], fsdp_units(model)
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise UserError("FSDP1 gathers weights in every micro-batch, so level steps would deadlock; use fully_shard")
    wrapped = [module for module in modules if isinstance(module, DistributedDataParallel)]
    synchronised: list[Any] = [module for module in modules if hasattr(module, "set_requires_gradient_sync")]
    if keep_weights:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
        gather_weights(model)
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        for unit in units:
            unit.set_is_last_backward(is_last)
            unit.set_reshard_after_backward(is_last, recurse=False)
        for module in synchronised:  # by fully_shard or replicate
            module.set_requires_gradient_sync(is_last)
        with ExitStack() as local:
            for module in wrapped if not is_last else ():
                local.enter_context(module.no_sync())
            if calibration is not None and index > 0 and not is_last:
                local.enter_context(calibration.timing(batch))
            yield batch


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """The modules of ``model`` whose weights FSDP2 gathers, in the order of a forward."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gather_weights(model: nn.Module) -> None:
    """Start gathering all weights that FSDP2 has sharded.

    If ranks gathered each layer in their own forward, one could wait there for another that waits for it in a shared
    micro-batch. A pipeline stage gathers while its first micro-batch is still on other stages.
    """
    for unit in fsdp_units(model):
        unit.unshard(async_op=True)


def fingerprint_of(plan: StepPlan) -> int:
    """A number that is equal for plans with equal documents, places, ranks and operations."""
    of_ranks = [[(part.segments, part.ranks) for part in rank] for rank in plan.ranks]
    return digest_of((plan.step, of_ranks, plan.operations))


def digest_of(value: object) -> int:
    """56 bits of the hash of ``repr(value)``, which fit an int64."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "little")
