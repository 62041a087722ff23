"""Collectives with which ranks agree before they start, so that no rank waits for a failed one."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.errors import UserError

T = TypeVar("T")

_AGREEING: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()  # by the group that trains


def on_every_rank(check: Callable[[], T]) -> T:
    """Call ``check`` on every rank and return its result; a ``UserError`` on one rank is raised on every rank."""
    problem = result = None
    try:
        result = check()
    except UserError as error:
        problem = str(error)
    first = next((text for text in gathered(problem) if text is not None), None)
    if first is not None:
        raise UserError(first)
    return result  # type: ignore[return-value]  # check did not raise, so it returned this


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """``value`` of every rank (of ``group``), in rank order; it must be picklable."""
    if not dist.is_initialized():  # one process
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def gathered_rows(
    row: Sequence[float], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None = None
) -> Tensor:
    """``row`` of every rank (of ``group``), in rank order, on the CPU; cheaper than ``gathered`` for a few numbers."""
    mine = torch.tensor(row, dtype=dtype, device=device)
    if not dist.is_initialized():  # one process
        return mine[None].cpu()
    rows = mine.new_empty(dist.get_world_size(group), len(row))
    dist.all_gather(list(rows.unbind()), mine, group)
    return rows.cpu()


def warn(message: str, group: dist.ProcessGroup | None = None) -> None:
    """Warn on the first process of ``group`` only, once for each line of code that calls this."""
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        warnings.warn(f"wlb: {message}", stacklevel=3)


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which ``group`` exchanges tensors: the GPU with NCCL; without a group, the training device."""
    on_gpu = torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in dist.get_backend_config(group))
    return torch.device("cuda" if on_gpu else "cpu")


def agreeing_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """The gloo communicator on which the processes of ``group`` agree; the first call is a collective one.

    It moves nothing to or from a GPU. Another thread may use it while gradients are reduced on ``group``, where its
    collectives would meet those of the other thread.
    """
    key: Any = group or dist.group.WORLD
    if key not in _AGREEING:
        ranks = None if group is None else dist.get_process_group_ranks(group)
        timeout = None  # gloo's, unless the group that trains tells its own
        with suppress(RuntimeError, AttributeError):
            timeout = key._get_backend(device_of(group)).options._timeout
        _AGREEING[key] = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=group is not None)
    return _AGREEING[key]


def sharing_group(size: int, group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """A new communicator of ``size`` neighbours in ``group`` for their exchanges; a collective call.

    On the communicator that reduces gradients an exchange would queue. The first call of NCCL needs all ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) % size:
        raise UserError(f"{size} does not divide the {len(ranks)} processes of the group; give the data-parallel group")
    first = dist.get_rank(group) // size * size
    sharing: dist.ProcessGroup = dist.new_group(ranks[first : first + size], use_local_synchronization=True)
    dist.all_reduce(torch.zeros(1, device=device_of(sharing)), group=sharing)
    return sharing
