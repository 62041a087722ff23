"""Every call of a communication library that a rank makes, as PyTorch's operators.

They are those of ``torch.distributed`` (FSDP, pipeline, key/value exchange) and the functional ones of DTensor (tensor
parallelism). Messages of one ``batch_isend_irecv`` have the same ``batch``: the library may run them in any order.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.distributed_c10d import _resolve_process_group

WEIGHTS, GRADIENTS = "gathering weights", "reducing gradients"
TENSOR_PARALLEL, LOSS = "tensor-parallel activations", "loss and norms over tensor-parallel ranks"
KEYS_AND_VALUES, STAGES, AGREEMENT = "keys and values", "activations of stages", "agreement of ranks"
EXPERTS, COUNTS = "tokens of experts", "numbers of tokens of experts"
_NAMESPACES = ("c10d", "_c10d_functional")
_OF_RESULTS = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}  # they communicate nothing


class Call(NamedTuple):
    """One call of ``operation`` by a rank.

    ``group`` is the communicator's name, which is the same on all its ``members`` (global ranks, in order). ``peer`` is
    the other side's global rank, of messages only. ``shape`` is what must agree between ranks: element type and number
    of elements; of an all-to-all, in which ranks differ, type and rows for and from every member. ``received`` are the
    bytes that the rank gets from others, once over a ring.
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
        if operator.namespace not in _NAMESPACES or operator.name() in _OF_RESULTS:
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


def _collective(operation: str, purpose: str, group: dist.ProcessGroup, tensor: Tensor, pieces: int = 1) -> Call:
    """One in which each rank has an equal part of the whole, which is ``pieces`` times as large as ``tensor``."""
    members = tuple(dist.get_process_group_ranks(group))
    received = pieces * tensor.nbytes * (len(members) - 1) // len(members)
    shape = _type(tensor), pieces * tensor.numel()
    return Call(operation, purpose, group.group_name, members, None, shape, received)


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _group(arguments: dict[str, Any]) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(arguments["process_group"])


def _plain(operation: str, purpose: str, name: str, arguments: dict[str, Any]) -> Call:
    tensor = arguments[name]
    while not isinstance(tensor, Tensor):
        tensor = tensor[0]
    return _collective(operation, purpose, _group(arguments), tensor)


def _functional(operation: str, purpose: str, arguments: dict[str, Any]) -> Call:
    group = _resolve_process_group(arguments["group_name"])
    tensor = arguments["input" if "input" in arguments else "self"]
    return _collective(operation, purpose, group, tensor, group.size() if operation == "all_gather" else 1)


def _all_to_all(arguments: dict[str, Any]) -> Call:
    """Keys and values, which have four dimensions; rows for experts; or how many those are, as many for every rank."""
    is_functional = "group_name" in arguments
    group = _resolve_process_group(arguments["group_name"]) if is_functional else _group(arguments)
    rows = arguments["input"]
    purpose = {4: KEYS_AND_VALUES, 2: EXPERTS, 1: COUNTS}[rows.dim()]
    even = [len(rows) // group.size()] * group.size()
    receives, sends = (tuple(arguments[f"{side}_split_sizes"]) or tuple(even) for side in ("output", "input"))
    others = sum(receives) - receives[group.rank()]
    row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
    call = _collective("all_to_all", purpose, group, rows)
    return call._replace(shape=(_type(rows), sends, receives), received=others * row_bytes)


def _message(operation: str, side: str, arguments: dict[str, Any]) -> Call:
    """Keys and values, which have four dimensions; activations of stages; or what stages agree on, in integers."""
    (tensor,), group = arguments["tensors"], _group(arguments)
    purpose = KEYS_AND_VALUES if tensor.dim() == 4 else STAGES if tensor.is_floating_point() else AGREEMENT
    call = _collective(operation, purpose, group, tensor)
    received = tensor.nbytes if operation == "receive" else 0
    return call._replace(peer=call.members[arguments[side]], received=received)


_READERS: dict[str, Callable[[dict[str, Any]], Call]] = {
    "c10d::_allgather_base_": partial(_plain, "all_gather", WEIGHTS, "output_tensor"),
    "c10d::allgather_": partial(_plain, "all_gather", AGREEMENT, "output_tensors"),
    "c10d::_reduce_scatter_base_": partial(_plain, "reduce_scatter", GRADIENTS, "input_tensor"),
    "c10d::allreduce_": partial(_plain, "all_reduce", AGREEMENT, "tensors"),
    "c10d::alltoall_base_": _all_to_all,
    "c10d::send": partial(_message, "send", "dst"),
    "c10d::recv_": partial(_message, "receive", "src"),
    "_c10d_functional::all_gather_into_tensor": partial(_functional, "all_gather", TENSOR_PARALLEL),
    "_c10d_functional::reduce_scatter_tensor": partial(_functional, "reduce_scatter", TENSOR_PARALLEL),
    "_c10d_functional::all_to_all_single": _all_to_all,
    "_c10d_functional::all_reduce": partial(_functional, "all_reduce", LOSS),
    "_c10d_functional::all_reduce_": partial(_functional, "all_reduce", LOSS),
}
