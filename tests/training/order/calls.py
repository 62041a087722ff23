"""Every call of a communication library that a rank makes, as PyTorch's operators.

They are those of ``torch.distributed`` (FSDP, pipeline, key/value exchange) and the functional ones of DTensor (tensor
parallelism). Messages of one ``batch_isend_irecv`` have the same ``batch``: the library may run them in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.distributed_c10d import _resolve_process_group

WEIGHTS, GRADIENTS = "gathering weights", "reducing gradients"
TENSOR_PARALLEL, LOSS = "tensor-parallel activations", "loss and norms over tensor-parallel ranks"
KEYS_AND_VALUES, STAGES, AGREEMENT = "keys and values", "activations of stages", "agreement of ranks"
_NAMESPACES = ("c10d", "_c10d_functional")


class Call(NamedTuple):
    """One call of ``operation`` by a rank.

    ``group`` is the communicator's name, which is the same on all its ``members`` (global ranks, in order). ``peer`` is
    the other side's global rank, of messages only. ``shape`` is what must agree between ranks: element type and number
    of elements; of an all-to-all, in which ranks differ, type and rows for and from every member. ``received`` are the
    bytes that the rank gets from others.
    """

    operation: str
    purpose: str
    group: str
    members: tuple[int, ...]
    peer: int | None
    shape: tuple[Any, ...]
    received: int
    batch: int | None = None


class CallLog:
    """The calls of one rank, in the order in which it makes them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._batches = 0
        self._batch: int | None = None

    def see(self, operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Note ``operator`` if it communicates; raises ``NotImplementedError`` if it does in a way unknown here."""
        if operator.namespace not in _NAMESPACES or operator is torch.ops._c10d_functional.wait_tensor.default:
            return
        reader = _READERS.get(operator.name())
        if reader is None:
            raise NotImplementedError(f"the communication operator {operator} is not known")
        named = {a.name: value for a, value in zip(operator._schema.arguments, args, strict=False)} | kwargs
        self.calls.append(reader(named)._replace(batch=self._batch))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Tell which messages are handed over together."""
        together = dist.batch_isend_irecv

        def batched(operations: list[dist.P2POp]) -> list[dist.Work]:
            self._batch = self._batches
            self._batches += 1
            try:
                return together(operations)
            finally:
                self._batch = None

        with mock.patch.object(dist, "batch_isend_irecv", batched):
            yield


def _call(
    operation: str,
    purpose: str,
    group: dist.ProcessGroup,
    shape: tuple[Any, ...],
    received: int,
    peer: int | None = None,
) -> Call:
    members = tuple(dist.get_process_group_ranks(group))
    return Call(operation, purpose, group.group_name, members, None if peer is None else members[peer], shape, received)


def _from_others(whole: Tensor, group: dist.ProcessGroup) -> int:
    """Bytes that a rank gets where every rank brings an equal part of ``whole``."""
    return whole.nbytes * (group.size() - 1) // group.size()


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return str(tensor.dtype).removeprefix("torch."), tensor.numel()


def _group(arguments: dict[str, Any]) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(arguments["process_group"])


def _divided(operation: str, purpose: str, name: str, arguments: dict[str, Any]) -> Call:
    """A collective in which each rank has an equal part of argument ``name``."""
    whole, group = arguments[name], _group(arguments)
    return _call(operation, purpose, group, _shape(whole), _from_others(whole, group))


def _gather_list(arguments: dict[str, Any]) -> Call:
    (parts,), group = arguments["output_tensors"], _group(arguments)
    received = sum(part.nbytes for part in parts) * (group.size() - 1) // group.size()
    return _call("all_gather", AGREEMENT, group, (_shape(parts[0])[0], sum(part.numel() for part in parts)), received)


def _all_reduce(arguments: dict[str, Any]) -> Call:
    (whole,), group = arguments["tensors"], _group(arguments)
    return _call("all_reduce", AGREEMENT, group, _shape(whole), 2 * _from_others(whole, group))


def _all_to_all(arguments: dict[str, Any]) -> Call:
    output, group = arguments["output"], _group(arguments)
    receives, sends = tuple(arguments["output_split_sizes"]), tuple(arguments["input_split_sizes"])
    others = sum(receives) - receives[group.rank()]
    row_bytes = math.prod(output.shape[1:]) * output.element_size()
    return _call("all_to_all", KEYS_AND_VALUES, group, (_shape(output)[0], sends, receives), others * row_bytes)


def _message(operation: str, side: str, arguments: dict[str, Any]) -> Call:
    """Keys and values, which have four dimensions; activations of stages; or what stages agree on, in integers."""
    (tensor,) = arguments["tensors"]
    purpose = KEYS_AND_VALUES if tensor.dim() == 4 else STAGES if tensor.is_floating_point() else AGREEMENT
    received = tensor.nbytes if operation == "receive" else 0
    return _call(operation, purpose, _group(arguments), _shape(tensor), received, arguments[side])


def _barrier(arguments: dict[str, Any]) -> Call:
    return _call("barrier", AGREEMENT, _group(arguments), (), 0)


def _functional(operation: str, arguments: dict[str, Any]) -> Call:
    tensor: Tensor = arguments["input" if "input" in arguments else "self"]
    group = _resolve_process_group(arguments["group_name"])
    dtype, elements = _shape(tensor)
    purpose = LOSS if operation == "all_reduce" else TENSOR_PARALLEL
    if operation == "all_gather":
        return _call(operation, purpose, group, (dtype, elements * group.size()), tensor.nbytes * (group.size() - 1))
    passes = 2 if operation == "all_reduce" else 1
    return _call(operation, purpose, group, (dtype, elements), passes * _from_others(tensor, group))


_READERS: dict[str, Callable[[dict[str, Any]], Call]] = {
    "c10d::_allgather_base_": partial(_divided, "all_gather", WEIGHTS, "output_tensor"),
    "c10d::allgather_": _gather_list,
    "c10d::_reduce_scatter_base_": partial(_divided, "reduce_scatter", GRADIENTS, "input_tensor"),
    "c10d::allreduce_": _all_reduce,
    "c10d::alltoall_base_": _all_to_all,
    "c10d::send": partial(_message, "send", "dst"),
    "c10d::recv_": partial(_message, "receive", "src"),
    "c10d::barrier": _barrier,
    "_c10d_functional::all_gather_into_tensor": partial(_functional, "all_gather"),
    "_c10d_functional::reduce_scatter_tensor": partial(_functional, "reduce_scatter"),
    "_c10d_functional::all_reduce": partial(_functional, "all_reduce"),
    "_c10d_functional::all_reduce_": partial(_functional, "all_reduce"),
}
