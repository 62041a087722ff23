"""Counts the bytes that PyTorch operations hold, now and at most."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Within this context: bytes of storages that operations returned and that still exist (``now``), and their peak.

    Tensors made before do not count, nor what a kernel uses inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in before and storage._cdata not in self._known:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        identity, size = storage._cdata, storage.nbytes()
        self._known.add(identity)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, identity, size)

    def _remove(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.now -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]
