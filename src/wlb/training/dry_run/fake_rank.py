"""One rank of a job with its real modules, plans and operators, on fake tensors.

The process group is PyTorch's fake one, which answers at once: what is received has the right size and no meaning.
Tensors are fake ones (``FakeTensorMode``), so every operator computes shapes, types and devices and nothing else. Their
device is the CPU also where a GPU's rank is rehearsed, as autograd cannot run on tensors of a device that PyTorch was
built without; what differs on a GPU is put in place by name: its attention back end, the fused RMSNorm, the optimizer's
multi-tensor kernels and its compute type.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wlb.attention.backends import BACKENDS, cpu, cuda
from wlb.attention.runs import Runs
from wlb.training.dry_run.calls import CallLog, is_exchanged
from wlb.training.dry_run.meter import EXCHANGE, MemoryMeter

_MESSAGES = (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default)
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


class StepWatcher(TorchDispatchMode):
    """Sees every operator on plain tensors; numbers read from fake ones, or inside a fake mode, are 1."""

    def __init__(self, meter: MemoryMeter, log: CallLog) -> None:
        super().__init__()
        self._meter, self._log = meter, log
        self.operators = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor or the like: its parts come by themselves
        if func is torch.ops.prim.device.default:
            return args[0].fake_device  # asked for at every turn, and no operator of the job
        if func is torch.ops.aten._local_scalar_dense.default and (isinstance(args[0], FakeTensor) or _is_faking()):
            return 1.0 if args[0].is_floating_point() else 1
        self.operators += 1
        self._log.see(func, args, kwargs)
        result = func(*args, **kwargs)
        self._meter.see(tree_leaves(result))
        if func is torch.ops.c10d.alltoall_base_.default:
            self._meter.adopt(args[:2], EXCHANGE)
        if func in _MESSAGES and is_exchanged(args[0][0]):
            self._meter.adopt(args[0], EXCHANGE)
        return result


def _is_faking() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` of a job of which no other process exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def longest_runs_of_attention() -> Iterator[None]:
    """Attend on the CPU in only two of the runs of a micro-batch, which may have hundreds; in all of a window."""
    with mock.patch.dict(BACKENDS, cpu=_LongestRuns()):
        yield


class _LongestRuns:
    """The CPU back end in those two neighbours whose results take the most bytes: it holds one's until the next's."""

    unsupported = staticmethod(cpu.unsupported)

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
        return cpu.forward(query, key, value, _longest_two(runs, heads=1, kv_heads=0))

    @staticmethod
    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum_exp: Tensor, runs: Runs
    ) -> tuple[Tensor, Tensor, Tensor]:
        longest = _longest_two(runs, query.shape[1], 2 * key.shape[1])
        return cpu.backward(grad, query, key, value, out, log_sum_exp, longest)


def _longest_two(runs: Runs, heads: int, kv_heads: int) -> Runs:
    """Neighbours with the most results, of so many heads for a query and a key; all runs where a window cuts blocks."""
    if runs.window is not None:
        return runs
    lengths = zip(runs.query_lengths, runs.key_lengths, strict=True)
    sizes = [heads * queries + kv_heads * keys for queries, keys in lengths]
    first = max(range(max(1, len(sizes) - 1)), key=lambda place: sum(sizes[place : place + 2]))
    pair = slice(first, first + 2)
    return replace(runs, query_lengths=runs.query_lengths[pair], key_lengths=runs.key_lengths[pair])


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Run the kernels that a GPU would."""
    norms = mock.patch.object(torch.nn.functional, "rms_norm", _fused_norm)
    with mock.patch.dict(BACKENDS, cuda=_CudaShapes()), norms:
        try:
            yield
        finally:
            cuda._extents.cache_clear()  # they are fake


class _CudaShapes:
    """The CUDA back end for fake tensors of any device."""

    forward = staticmethod(cuda.forward)
    backward = staticmethod(cuda.backward)
    unsupported = staticmethod(cuda.unsupported_by_kernel)


def _fused_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    normed: Tensor = _FusedNorm.apply(x, weight)
    return normed


class _FusedNorm(torch.autograd.Function):
    """What the kernel keeps and returns, without its numbers: PyTorch composes it of several operators on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x[..., :1].to(torch.float32))  # one over the norm, of each row
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), grad.flatten(0, -2).sum(0).to(weight.dtype)
