"""What a rank allocates is what the plan makes it send, receive and attend; what it keeps grows with its own tokens."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.attention.cuda_on_cpu import cuda_on_cpu
from tests.attention.live_bytes import LiveBytes
from tests.attention.oracle import random_inputs
from tests.training.distributed import join_again, run_ranks
from wlb.attention import context_parallel_attention
from wlb.attention.exchange import KVReexchanges
from wlb.attention.shard_layout import shard_layout
from wlb.sharding import make_shard_plan
from wlb.sharding.plan import ShardPlan

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 16
QUERY_ROW = HEADS * HEAD_DIM * 8  # bytes of a token's query, or output, in float64
KEY_VALUE_ROW = 2 * KV_HEADS * HEAD_DIM * 8
LOG_SUM_EXP_ROW = HEADS * 8
HEADS_AND_TAILS = ([[s, 0, 250] for s in range(3)], [[s, 250, 300] for s in range(3)])
APART = ShardPlan("apart", (300, 300, 300), tuple(map(np.array, HEADS_AND_TAILS)))


@dataclass(frozen=True)
class Memory:
    """Bytes allocated by one rank: between forward and backward, and at most in each, above what was there before."""

    tokens: int
    attending: int  # tokens that attend received keys
    received: int  # tokens received from other ranks
    exchanged: int  # tokens sent, received, and received in the order in which they are attended
    held: int
    forward_peak: int
    backward_peak: int


@cuda_on_cpu()
def _measure(plan: ShardPlan, backend: str, folder: Path) -> Memory:
    rank = dist.get_rank()
    layout = shard_layout(plan, rank, torch.device("cpu"))
    tokens = int(plan.tokens_per_rank[rank])
    query, key, value, grad_out = random_inputs(tokens, HEADS, KV_HEADS, HEAD_DIM, seed=rank)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    with LiveBytes() as live:
        out = context_parallel_attention(query, key, value, plan, None, backend)
    forward_peak = live.peak
    join_again(folder / f"{plan.strategy}, {backend}")
    live.peak = held = live.now
    with live:
        grads = torch.autograd.grad(out, (query, key, value), grad_out)
    backward_peak = live.peak - held
    assert len(grads) == 3
    received = sum(sum(part.receive_counts) for part in layout.parts)
    attended = [part.attended for part in layout.parts if part.attended]
    exchanged = (
        received + sum(len(part.send_rows) for part in layout.parts) + sum(sum(a.batch.key_lengths) for a in attended)
    )
    attending = sum(sum(a.batch.query_lengths) for a in attended)
    return Memory(tokens, attending, received, exchanged, held, forward_peak, backward_peak)


def _measure_all(plans: list[ShardPlan], backend: str, folder: Path) -> list[Memory]:
    return [_measure(plan, backend, folder) for plan in plans]


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_memory_is_bounded_by_what_the_plan_needs(backend: str, tmp_path: Path) -> None:
    lengths = [700, 40, 33, 500, 1, 260]
    whole = ShardPlan("whole", (400, 400), (np.array([[0, 0, 400]]), np.array([[1, 0, 400]])))
    plans = [make_shard_plan(lengths, 2, strategy) for strategy in ("per_sequence", "per_document")] + [whole, APART]
    assert [plan.keeps_received for plan in plans] == [True, True, True, False]
    for memories in run_ranks(2, _measure_all, plans, backend, tmp_path):
        for plan, memory in zip(plans, memories, strict=True):
            own = memory.tokens * (QUERY_ROW + LOG_SUM_EXP_ROW)
            own_grads = memory.tokens * (QUERY_ROW + KEY_VALUE_ROW)
            attending = memory.attending * (QUERY_ROW + LOG_SUM_EXP_ROW)
            exchanged = memory.exchanged * KEY_VALUE_ROW
            kept = memory.received if plan.keeps_received else 0
            assert kept <= -(-plan.tokens // 2)
            # Beside query, key and value, which the caller has.
            assert memory.held == own + kept * KEY_VALUE_ROW, plan.strategy
            # Results of a run are beside their place in the whole for a moment: at most twice the whole.
            assert memory.forward_peak <= 2 * own + 2 * attending + exchanged, plan.strategy
            assert memory.backward_peak <= 2 * own_grads + 4 * attending + 2 * exchanged, plan.strategy


def _held_after_layers(shard_plan: ShardPlan, folder: Path) -> tuple[int, int]:
    """Bytes held after forward and backward of some layers while the graph is alive: of all of them, and of one."""
    held = []
    for layers in (4, 1):
        tensors = random_inputs(int(shard_plan.tokens_per_rank[dist.get_rank()]), HEADS, KV_HEADS, HEAD_DIM, seed=0)
        query, key, value = (tensor.requires_grad_() for tensor in tensors[:3])
        with LiveBytes() as live:
            reexchanges = KVReexchanges()
            outs = [query]
            for _ in range(layers):
                outs.append(context_parallel_attention(outs[-1], key, value, shard_plan, None, reexchanges=reexchanges))
            outs[-1].sum().backward()
        outs = outs[-1:]
        join_again(folder / str(layers))
        held.append(live.now)
    return held[0], held[1]


def test_what_is_sent_again_is_not_held_once_it_was_used(tmp_path: Path) -> None:
    for of_four, of_one in run_ranks(2, _held_after_layers, APART, tmp_path):
        assert of_four == of_one
