"""The CUDA back end without a GPU: the operators' shape functions accept its calls, and the kernel's checks hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.training.order.fake_rank import fake_process_group
from wlb.attention.backends import cuda
from wlb.attention.exchange import PlanRanks, add_returned, return_gradients, send_keys
from wlb.attention.packed_attention import _attend_received, _received_gradients
from wlb.attention.shard_layout import shard_layout
from wlb.attention.variable_length import VariableLengthBatch
from wlb.sharding import make_shard_plan

CUDA = torch.device("cuda", 0)
# Where PyTorch was built without CUDA, it can add no two tensors of that device, fake or not.
ADDED_ON = CUDA if torch.backends.cuda.is_built() else torch.device("cpu")
HEAD_DIM = 64


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield
    cuda._cu_seqlens.cache_clear()  # or real tensors would meet these


def tensor(*shape: int, device: torch.device = CUDA) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device)


def check_as_the_kernel(tensors: tuple[Tensor, ...], batch: VariableLengthBatch, heads: tuple[int, int]) -> None:
    """What flash_api.cpp checks and the shape functions do not."""
    assert {t.dtype for t in tensors} == {torch.bfloat16}
    assert all(t.stride(-1) == 1 and t.is_cuda for t in tensors)
    queries, keys, longest_query, longest_key = cuda._cu_seqlens(batch, CUDA)
    for begins in (queries, keys):
        assert begins.dtype == torch.int32
        assert begins.is_contiguous()
        assert begins.is_cuda
        assert begins.shape == (len(batch.query_lengths) + 1,)
    assert (longest_query, longest_key) == (max(batch.query_lengths), max(batch.key_lengths))
    assert heads[0] % heads[1] == 0


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize(
    "batch",
    [
        VariableLengthBatch.of_segments((30, 34)),
        VariableLengthBatch.of_segments((30, 34), window=8),
        VariableLengthBatch((30, 34), (50, 7), causal=False),
        VariableLengthBatch((1, 1), (5, 9), causal=False),
    ],
    ids=["own", "window", "received", "single queries"],
)
def test_every_call_is_accepted(batch: VariableLengthBatch, heads: tuple[int, int]):
    query = tensor(sum(batch.query_lengths), heads[0], HEAD_DIM)
    received = tensor(sum(batch.key_lengths), 2, heads[1], HEAD_DIM)
    key, value = received.unbind(1)  # as they arrive, side by side
    assert cuda.unsupported(query) is None
    check_as_the_kernel((query, key, value), batch, heads)
    out, log_sum_exp = cuda.forward(query, key, value, batch)
    assert (out.shape, out.dtype, out.device) == (query.shape, torch.bfloat16, CUDA)
    assert (log_sum_exp.shape, log_sum_exp.dtype) == ((heads[0], len(query)), torch.float32)
    grads = cuda.backward(torch.empty_like(out), query, key, value, out, log_sum_exp, batch)
    for grad, of in zip(grads, (query, key, value), strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (of.shape, torch.bfloat16, CUDA)


@pytest.mark.parametrize("rank", [0, 1])
def test_received_keys_are_attended_and_merged(rank: int):
    """Everything between the messages of a context-parallel exchange, in half precision and with grouped heads."""
    plan = make_shard_plan((300, 12, 200), 2, "per_document")
    layout = shard_layout(plan, rank, ADDED_ON)
    assert layout.own_batch is not None
    assert layout.parts
    rows = int(plan.tokens_per_rank[rank])
    query, key, value = (tensor(rows, heads, HEAD_DIM, device=ADDED_ON) for heads in (8, 2, 2))
    out, log_sum_exp = cuda.forward(query, key, value, layout.own_batch)
    for part in layout.parts:
        received = tensor(sum(part.receive_counts), 2, 2, HEAD_DIM, device=ADDED_ON)
        assert part.attended is not None
        _attend_received(query, received, out, log_sum_exp, part.attended, cuda)
        grad_rows, grad_received = _received_gradients(
            torch.empty_like(out), query, received, out, log_sum_exp, part.attended, cuda
        )
        assert grad_received.shape == received.shape
        assert grad_received.is_contiguous()
        assert len(grad_rows) == sum(part.attended.batch.query_lengths)
        returned = tensor(sum(part.send_counts), 2, 2, HEAD_DIM, device=ADDED_ON)
        for grad in add_returned([torch.empty_like(key), torch.empty_like(value)], [returned], [part]):
            assert (grad.shape, grad.dtype) == (key.shape, torch.float32)


@pytest.mark.parametrize("members", [None, (0, 1)])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_exchanged_is_what_nccl_takes(rank: int, members: tuple[int, ...] | None):
    """Both ways of the key/value exchange, with tensors of device cuda: contiguous, of the rows that the plan says."""
    plan = make_shard_plan((300, 12, 200), 2, "per_document")
    layout = shard_layout(plan, rank, CUDA)
    rows = int(plan.tokens_per_rank[rank])
    with fake_process_group(rank, 2):
        ranks = PlanRanks(None, members)
        for part in layout.parts:
            arrival = send_keys(tensor(rows, 2, HEAD_DIM), tensor(rows, 2, HEAD_DIM), part, ranks)
            returning = return_gradients(torch.empty_like(arrival.wait()), part, ranks)
            for message, counts in (
                (arrival.sent, part.send_counts),
                (arrival.received, part.receive_counts),
                (returning.sent, part.receive_counts),
                (returning.wait(), part.send_counts),
            ):
                assert message.shape == (sum(counts), 2, 2, HEAD_DIM)
                assert (message.dtype, message.device) == (torch.bfloat16, CUDA)
                assert message.is_contiguous()


def arguments_of(operator: torch._ops.OpOverload) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


def test_the_operators_take_their_arguments_in_this_order():
    """They are not public; ``cuda`` hands over most by position, on every torch that is supported."""
    attended = ["query", "key", "value"]
    cu_seqlens = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    options = ["scale", "window_size_left", "window_size_right"]
    forward = arguments_of(torch.ops.aten._flash_attention_forward.default)
    assert forward[:13] == [*attended, *cu_seqlens, "return_debug_mask", *options]
    backward = arguments_of(torch.ops.aten._flash_attention_backward.default)
    assert backward == ["grad_out", *attended, "out", "logsumexp", *cu_seqlens, "rng_state", "unused", *options]


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 2, 60), torch.bfloat16), ((4, 2, 264), torch.float16), ((4, 2, 64), torch.float32)]
)
def test_what_the_kernel_refuses_is_refused_before(shape: tuple[int, ...], dtype: torch.dtype):
    assert cuda.unsupported(torch.empty(shape, dtype=dtype, device=CUDA))
