"""What a rank holds in memory during a step, by kind, counted storage by storage.

Every storage that an operator returns is counted from then to its end, under the kind of what is going on: FSDP gathers
weights, or reduces gradients, or the optimizer runs. Keys and values are known by the call that sends them, weights and
optimizer state from the start; all else are activations. No allocator rounds sizes here, so this is what a GPU's
allocator is asked for, without fragments.

This is the only file that touches private parts of FSDP2 and DTensor (torch 2.11 to 2.13): it wraps three methods of
``FSDPParamGroup`` to know what is going on, and reads the gradients that one of them is about to take. DTensor tries
operators on tensors of global size to learn their shapes; these are never held and not counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

WEIGHTS, GATHERED = "weights", "gathered weights"
GRADIENTS, OPTIMIZER = "gradients", "optimizer"
BATCHES, ACTIVATIONS, EXCHANGE = "batches", "activations", "exchange"


class MemoryMeter:
    """Bytes held now and at the peak, by kind."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._known: dict[int, tuple[str, int]] = {}  # a storage's address -> kind, bytes
        self._kind = ACTIVATIONS
        self._paused = False
        self._total = self._largest = 0

    def see(self, results: Iterable[object]) -> None:
        """Count what an operator returned, as far as it is new."""
        if self._paused:
            return
        for tensor in results:
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                self._count(tensor, self._kind, keep=True)

    def adopt(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Count ``tensors`` as ``kind`` from now on, new or known."""
        for tensor in tensors:
            if tensor is not None:
                self._count(tensor.to_local() if isinstance(tensor, DTensor) else tensor, kind, keep=False)

    def forget_peak(self) -> None:
        """Begin anew, from what is held now."""
        self.peak, self._largest = Counter(self.held), self._total

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Count what is new inside as ``kind``."""
        outside, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = outside

    @contextmanager
    def watching_torch(self) -> Iterator[None]:
        """Tell what FSDP allocates, see it free and fill again what it keeps, and leave out what DTensor only tries."""
        with ExitStack() as patches:
            for name, kind in (("unshard", GATHERED), ("wait_for_unshard", GATHERED), ("post_backward", GRADIENTS)):
                patches.enter_context(mock.patch.object(FSDPParamGroup, name, self._counted(name, kind)))
            patches.enter_context(mock.patch.object(torch.optim.AdamW, "step", self._optimized()))
            patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", self._resized()))
            name = "_propagate_tensor_meta_non_cached"
            patches.enter_context(mock.patch.object(ShardingPropagator, name, self._not_counted(name)))
            yield

    def _counted(self, name: str, kind: str) -> Callable[..., Any]:
        original = getattr(FSDPParamGroup, name)

        def method(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            if kind == GRADIENTS:  # autograd has made them, as anything else
                self.adopt((_gradient(parameter) for parameter in group.fsdp_params), GRADIENTS)
            with self.counting(kind):
                return original(group, *args, **kwargs)

        return method

    def _optimized(self) -> Callable[..., Any]:
        original = torch.optim.AdamW.step

        def step(optimizer: torch.optim.AdamW) -> Any:
            with self.counting(OPTIMIZER):
                return original(optimizer)

        return step

    def _not_counted(self, name: str) -> Callable[..., Any]:
        original = getattr(ShardingPropagator, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            self._paused = True
            try:
                return original(*args, **kwargs)
            finally:
                self._paused = False

        return method

    def _resized(self) -> Callable[..., Any]:
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in self._known:
                kind, before = self._known[storage._cdata]
                self._known[storage._cdata] = (kind, size)
                self._add(kind, size - before)
            return result

        return resize_

    def _count(self, tensor: Tensor, kind: str, *, keep: bool) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._known:
            self._known[address] = (kind, storage.nbytes())
            weakref.finalize(storage, self._freed, address)
            self._add(kind, storage.nbytes())
            return
        before, size = self._known[address]
        if not keep and before != kind:
            self._known[address] = (kind, size)
            self.held[before] -= size
            self.held[kind] += size

    def _freed(self, address: int) -> None:
        kind, size = self._known.pop(address)
        self._add(kind, -size)

    def _add(self, kind: str, size: int) -> None:
        self.held[kind] += size
        self._total += size
        if self._total > self._largest:
            self._largest = self._total
            self.peak = Counter(self.held)


def _gradient(parameter: Any) -> Tensor | None:
    unsharded = getattr(parameter, "_unsharded_param", None)
    return None if unsharded is None else unsharded.grad
