"""Collectives through which ranks agree before they start, so that none waits for one that has failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.errors import UserError

T = TypeVar("T")


def on_every_rank(check: Callable[[], T]) -> T:
    """Call ``check`` on every rank; returns its result, or raises on every rank the ``UserError`` it raised on one."""
    problem = result = None
    try:
        result = check()
    except UserError as error:
        problem = str(error)
    first = next((text for text in gathered(problem) if text is not None), None)
    if first is not None:
        raise UserError(first)
    return result  # type: ignore[return-value]  # check returned it: it did not raise here


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """``value`` of every rank (of ``group``), in rank order; it is pickled."""
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def gathered_rows(
    row: Sequence[float], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None = None
) -> Tensor:
    """``row`` of every rank (of ``group``), in rank order, on the CPU: the cheap ``gathered`` for a few numbers."""
    mine = torch.tensor(row, dtype=dtype, device=device)
    if not dist.is_initialized():  # one process
        return mine[None].cpu()
    rows = mine.new_empty(dist.get_world_size(group), len(row))
    dist.all_gather(list(rows.unbind()), mine, group)
    return rows.cpu()


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where ``group`` exchanges tensors: the GPU if it has NCCL; without a group, where a process would train."""
    on_gpu = torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in dist.get_backend_config(group))
    return torch.device("cuda" if on_gpu else "cpu")


def sharing_group(size: int, group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """A communicator of the ``size`` neighbours in ``group``, for what they exchange; a collective call.

    It is not the one that reduces gradients, behind which an exchange would queue. NCCL's first call needs all ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) % size:
        raise UserError(f"{len(ranks)} processes are no groups of {size}; give the group of the data-parallel ranks")
    first = dist.get_rank(group) // size * size
    sharing: dist.ProcessGroup = dist.new_group(ranks[first : first + size], use_local_synchronization=True)
    dist.all_reduce(torch.zeros(1, device=device_of(sharing)), group=sharing)
    return sharing
