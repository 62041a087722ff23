"""PyTorch's own context parallelism under our balancers, in real processes, against attention in one."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._attention import (
    _context_parallel_shard,
    _ContextParallel,
    _PTRRLoadBalancer,
    context_parallel_unshard,
)
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tests.attention.oracle import output_and_gradients, random_inputs
from tests.training.distributed import run_ranks
from wlb.errors import UserError
from wlb.integrations.torch_context_parallel import MaskBlockBalancer, torch_load_balancer
from wlb.sharding import make_shard_plan

LENGTHS = (300, 5, 87, 120)  # 512 tokens, as two ranks of flex attention's 128-token blocks want; none a multiple of 4
HEADS, HEAD_DIM = 2, 16
CP_FLEX = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.FLEX)


class _FlexAttention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask) -> Tensor:
        out = flex_attention(query, key, value, block_mask=block_mask)
        assert isinstance(out, Tensor)
        return out


def _document_mask() -> BlockMask:
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[query] == document[key])

    return create_block_mask(visible, 1, 1, sum(LENGTHS), sum(LENGTHS), device="cpu")


def _attend_with_torch(strategy: str) -> tuple[list[Tensor], Tensor]:
    """The whole output and gradients, and this rank's part of the positions after rearranging them."""
    warnings.simplefilter("ignore")  # uncompiled flex attention warns on every call
    flex._validate_device = lambda *_: None  # it has gradients on CPUs, uncompiled, but asks not to be used there
    mesh, mask = init_device_mesh("cpu", (dist.get_world_size(),)), _document_mask()
    balancer = (
        MaskBlockBalancer(mask, mesh.size())
        if strategy == "mask_blocks"
        else torch_load_balancer(make_shard_plan(LENGTHS, mesh.size(), strategy))
    )
    inputs = random_inputs(sum(LENGTHS), HEADS, HEADS, HEAD_DIM, seed=0)
    batched = [tensor.transpose(0, 1)[None].contiguous() for tensor in inputs]
    positions = torch.arange(sum(LENGTHS))
    with torch.compiler.set_stance("force_eager"):
        *shards, mine = _context_parallel_shard(mesh, [*batched, positions], [2, 2, 2, 2, 0], balancer)
        (mask_shard,) = _context_parallel_shard(mesh, [mask], [2], balancer)
        *inputs_shards, grad_out = [shard for shard in shards if isinstance(shard, Tensor)]
        query, key, value = (shard.detach().requires_grad_() for shard in inputs_shards)
        out = parallelize_module(_FlexAttention(), mesh, CP_FLEX)(query, key, value, block_mask=mask_shard)
        gradients = torch.autograd.grad(out, (query, key, value), grad_out)
    whole = context_parallel_unshard(mesh, [out.detach(), *gradients], [2] * 4, balancer)
    assert isinstance(mine, Tensor)
    return [tensor[0].transpose(0, 1) for tensor in whole], mine


@pytest.mark.parametrize("strategy", ["mask_blocks", "per_document", "per_sequence"])
def test_torchs_context_parallel_under_our_order_equals_one_process(strategy: str) -> None:
    expected = output_and_gradients(random_inputs(sum(LENGTHS), HEADS, HEADS, HEAD_DIM, seed=0), LENGTHS)
    for rank, (results, mine) in enumerate(run_ranks(2, _attend_with_torch, strategy)):
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=1e-10, atol=1e-10)
        if strategy == "mask_blocks":  # the queries' blocks attend 1, 2, 3 and 2 blocks of keys
            assert mine.view(2, 128)[:, 0].tolist() in ([0, 256], [128, 384])
        else:
            assert mine.tolist() == make_shard_plan(LENGTHS, 2, strategy).positions(rank).tolist()


def test_a_plan_with_unequal_ranks_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="gives ranks 2 to 3 tokens, PyTorch wants equally many") as refusal:
        torch_load_balancer(make_shard_plan([4, 1], 2, "per_document"))
    assert "\n" not in str(refusal.value)


def _mask_of_work(rows: list[list[int]], full: int = 0) -> BlockMask:
    """Blocks of queries that attend so many blocks of keys, ``full`` of them without a mask inside."""
    work = torch.tensor(rows, dtype=torch.int32)[:, None]
    columns = torch.arange(work.shape[-1], dtype=torch.int32).expand(*work.shape, -1)
    return BlockMask.from_kv_blocks(
        work - full, columns, torch.full_like(work, full), columns, BLOCK_SIZE=128, compute_q_blocks=False
    )


def _work_of_ranks(balancer: MaskBlockBalancer | _PTRRLoadBalancer, rows: list[list[int]], ranks: int) -> np.ndarray:
    """Blocks of keys that every rank attends in each row; shape (rows, ranks)."""
    order, restore = balancer._generate_indices(), balancer._generate_indices(restore=True)
    whole = torch.arange(order.shape[1]).expand_as(order)
    assert torch.equal(order.gather(1, restore), whole)
    assert torch.equal(order.sort(dim=1).values, whole)
    blocks = order.view(len(rows), -1, 128)
    assert torch.equal(blocks, blocks[:, :, :1] + torch.arange(128))
    work = torch.tensor(rows).gather(1, blocks[:, :, 0] // 128)
    return work.view(len(rows), ranks, -1).sum(dim=2).numpy()


@given(st.data())
def test_whole_mask_blocks_are_dealt_as_evenly_as_by_torch_or_better(data: st.DataObject) -> None:
    ranks, per_rank = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    row = st.lists(st.integers(1, 20), min_size=ranks * per_rank, max_size=ranks * per_rank)
    rows = data.draw(st.lists(row, min_size=1, max_size=2))
    mask = _mask_of_work(rows, full=1)
    ours = _work_of_ranks(MaskBlockBalancer(mask, ranks), rows, ranks)
    theirs = _work_of_ranks(_PTRRLoadBalancer(mask, ranks), rows, ranks)
    assert (ours.max(axis=1) <= theirs.max(axis=1)).all()


def test_masks_that_cannot_be_divided_equally_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"384 tokens .* pad micro-batches to a multiple of 256 tokens"):
        MaskBlockBalancer(_mask_of_work([[1, 1, 1]]), 2)
    with pytest.raises(UserError, match="differs between 2 heads"):
        MaskBlockBalancer(create_block_mask(lambda b, h, q, k: q >= k + h, 1, 2, 256, 256, device="cpu"), 2)
