"""Which tensor-parallel collectives of a compiled block torch takes apart, in the graphs that inductor compiles."""

import copy
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx

from tests.programs import FORKS
from tests.training.order.fake_rank import fake_process_group
from wlb.attention import context_parallel_attention
from wlb.job.config import JobConfig
from wlb.sharding import make_shard_plan
from wlb.training.dry_run import find_problems
from wlb.training.parallel.parallelize import compile_blocks
from wlb.training.rank_model import build_model

pytest.importorskip("torch._inductor.fx_passes.micro_pipeline_tp")

TOKENS = 20
COLLECTIVES = ("all_gather_into", "reduce_scatter_tensor", "fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def _collectives(metrics: Path) -> dict[str, dict[str, int]]:
    """Collectives of a forward and of a backward of a block, in a job of which no other process exists."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes import post_grad

    found = {"forward": Counter[str](), "backward": Counter[str]()}

    def count(graph: fx.GraphModule, inputs: Any, is_backward: bool = False, **_: Any) -> Any:
        """Instead of writing code: run inductor's passes on a copy, because a CPU lacks their operators."""
        passed = copy.deepcopy(graph)
        post_grad.view_to_reshape(passed)
        post_grad.post_grad_passes(passed, is_inference=False)
        names = [name for node in passed.graph.nodes for name in COLLECTIVES if name in str(node.target)]
        found["backward" if is_backward else "forward"].update(names)
        return make_boxed_func(graph.forward)

    model = {"hidden": 16, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn_hidden": 24, "vocab_size": 32}
    sections: dict[str, dict[str, Any]] = {
        "data": {"store": "elsewhere", "context_window": 64},
        "parallel": {"dp": 2, "tp": 2},
        "training": {"compile": True, "async_tp": True, "dtype": "float32"},
        "metrics": {"dir": metrics},
    }
    checked, _ = find_problems(JobConfig.model_validate({"model": model} | sections), "h100")
    backend: Any = partial(compile_fx.compile_fx, inner_compile=count)
    compiling = mock.patch("wlb.training.parallel.parallelize.compile_blocks", partial(compile_blocks, backend=backend))
    # A torch for CPUs has no NCCL, without which the pass does nothing.
    has_nccl = mock.patch.object(dist, "is_nccl_available", return_value=True)
    with fake_process_group(0, 4), has_nccl, compiling:
        (stage,) = build_model(checked, torch.device("cpu")).stages
        plan = make_shard_plan([TOKENS], 1, "per_sequence")
        attend = partial(context_parallel_attention, shard_plan=plan, group=None)
        scores: Any = stage(torch.arange(TOKENS), torch.arange(TOKENS), attend)
        scores.to_local().sum().backward()
    return {phase: dict(counts) for phase, counts in found.items()}


def test_all_collectives_of_a_block_overlap_except_of_sums(tmp_path: Path):
    with ProcessPoolExecutor(1, FORKS) as pool:  # PyTorch keeps meshes for as long as a process lives
        found = pool.submit(_collectives, tmp_path).result()
    assert found == {
        "forward": {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2},
        "backward": {"fused_all_gather_matmul": 2, "reduce_scatter_tensor": 2},
    }
