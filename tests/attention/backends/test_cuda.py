"""The CUDA back end on fake tensors of a GPU; its results, the other tests prove with ``cuda_on_cpu``."""

from collections.abc import Iterator
from unittest import mock

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
    # Its cache would mix fake tensors and real ones.
    with FakeTensorMode(), mock.patch.object(cuda, "_cu_seqlens", cuda._cu_seqlens.__wrapped__):
        yield


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


ATTENDED = "Tensor query, Tensor key, Tensor value"
LENGTHS = "cum_seq_q, Tensor{0} cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal"
OPTIONS = "*, float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None"


@pytest.mark.parametrize(
    ("name", "arguments", "returns"),
    [
        (
            "_flash_attention_forward",
            f"{ATTENDED}, Tensor? {LENGTHS.format('?')}, bool return_debug_mask, {OPTIONS}",
            "Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, Tensor debug_attn_mask",
        ),
        (
            "_flash_attention_backward",
            f"Tensor grad_out, {ATTENDED}, Tensor out, Tensor logsumexp, Tensor {LENGTHS.format('')}, "
            f"Tensor rng_state, Tensor unused, {OPTIONS}",
            "Tensor, Tensor, Tensor",
        ),
    ],
)
def test_the_operators_are_the_same_on_every_torch(name: str, arguments: str, returns: str):
    """They are not public, and ``cuda`` hands over most by position. Newer ones add arguments with defaults."""
    schema = getattr(torch.ops.aten, name).default._schema
    assert str(schema).startswith(f"aten::{name}({arguments}")
    assert str(schema).endswith(f") -> ({returns})")
    assert all(argument.has_default_value() for argument in schema.arguments[arguments.count(",") :])
    on_cuda, on_cpu = (torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key) for key in ("CUDA", "CPU"))
    assert on_cuda == torch.backends.cuda.is_built()
    assert not on_cpu  # or ``cuda_on_cpu`` would replace it


@pytest.mark.parametrize(
    ("head_dim", "dtype", "reason"),
    [
        (60, torch.bfloat16, "head_dim 60 is not a multiple of 8"),
        (264, torch.float16, "head_dim 264 is not a multiple of 8 up to 256"),
        (64, torch.float32, "torch.float32 is not one of torch.bfloat16, torch.float16"),
        (8, torch.bfloat16, "nothing"),
        (256, torch.float16, "nothing"),
    ],
)
def test_what_the_kernel_refuses_is_refused_before(head_dim: int, dtype: torch.dtype, reason: str):
    query = torch.empty(4, 2, head_dim, dtype=dtype, device=CUDA)
    assert reason in (cuda.unsupported(query) or "nothing")
    with mock.patch.object(torch.version, "hip", "7.0"):
        assert "ROCm" in str(cuda.unsupported(query))
