"""PyTorch's own context parallelism under our plans, in real processes, against attention in one."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._attention import (
    _context_parallel_shard,
    _ContextParallel,
    context_parallel_unshard,
)
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tests.attention.oracle import dense_attention, random_inputs
from tests.training.distributed import run_ranks
from wlb.errors import UserError
from wlb.integrations.torch_context_parallel import torch_load_balancer
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


def _attend_with_torch(strategy: str) -> tuple[Tensor, Tensor]:
    """The whole output, and this rank's part of the positions after rearranging them."""
    warnings.simplefilter("ignore")  # uncompiled flex attention warns on every call
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    balancer = torch_load_balancer(make_shard_plan(LENGTHS, mesh.size(), strategy))
    query, key, value, _ = random_inputs(sum(LENGTHS), HEADS, HEADS, HEAD_DIM, seed=0)
    batched = [tensor.transpose(0, 1)[None].contiguous() for tensor in (query, key, value)]
    positions = torch.arange(sum(LENGTHS))
    with torch.compiler.set_stance("force_eager"):
        *shards, mask, mine = _context_parallel_shard(
            mesh, [*batched, _document_mask(), positions], [2, 2, 2, 2, 0], balancer
        )
        out = parallelize_module(_FlexAttention(), mesh, CP_FLEX)(*shards, block_mask=mask)
    (whole,) = context_parallel_unshard(mesh, [out], [2], balancer)
    assert isinstance(mine, Tensor)
    return whole[0].transpose(0, 1), mine


@pytest.mark.parametrize("strategy", ["per_document", "per_sequence"])
def test_torchs_context_parallel_under_our_plan_equals_one_process(strategy: str) -> None:
    query, key, value, _ = random_inputs(sum(LENGTHS), HEADS, HEADS, HEAD_DIM, seed=0)
    expected = dense_attention(query, key, value, LENGTHS)
    plan = make_shard_plan(LENGTHS, 2, strategy)
    for rank, (out, mine) in enumerate(run_ranks(2, _attend_with_torch, strategy)):
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        assert mine.tolist() == plan.positions(rank).tolist()


def test_a_plan_with_unequal_ranks_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="gives ranks 2 to 3 tokens, PyTorch wants equally many") as refusal:
        torch_load_balancer(make_shard_plan([4, 1], 2, "per_document"))
    assert "\n" not in str(refusal.value)
