"""Running steps: what is refused, what is returned, and lower precision. Exactness is test_equivalence's."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from tests.training.distributed import run_ranks
from tests.training.documents import RandomDocuments
from wlb.documents.segments import Segment
from wlb.models.transformer import TransformerConfig
from wlb.packing.plan import MicroBatch
from wlb.runtime.batch import Batch, RankSlice
from wlb.runtime.reading import make_batch
from wlb.schedules.layout import Layout
from wlb.schedules.operations import (
    BACKWARD,
    FORWARD,
    HEAD,
    INPUT,
    WEIGHT,
    Operation,
    RankOperations,
    rank_operations,
)
from wlb.training.parallel.mesh import build_mesh
from wlb.training.parallel.parallelize import Execution, build_stage_modules
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.workload import ModelShape

CONFIG = TransformerConfig(
    ModelShape(hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn_hidden=48, vocab_size=64)
)
STORE = RandomDocuments(np.array([50, 7, 23, 64, 3, 90]), vocab_size=64)
MICRO_BATCHES = [(0, 1), (2,), (3, 4), (5,)]
LOSS_TOKENS = int((STORE.lengths - 1).sum())


def _batches(micro_batches: list[tuple[int, ...]]) -> list[Batch]:
    return [
        RankSlice().of(
            make_batch(MicroBatch(tuple(Segment(d, 0, int(STORE.lengths[d])) for d in documents), 0.0), STORE)
        )
        for documents in micro_batches
    ]


def _run(parallel: Layout, dtype: torch.dtype, operations: Sequence[RankOperations] = ()) -> dict[str, Any]:
    """This rank's share of a step's loss, its gradients, and the types that it computes in and stores."""
    mesh, device = build_mesh(parallel, "cpu"), torch.device("cpu")
    stages = build_stage_modules(CONFIG, parallel, mesh, Execution(device, dtype), seed=0)
    per_rank = len(MICRO_BATCHES) // parallel.dp
    runner = PipelineRunner(stages, parallel, mesh, per_rank, Execution(device, dtype))
    computed: set[torch.dtype] = set()
    for module in (module for stage in stages for module in stage.modules() if isinstance(module, nn.Linear)):
        module.register_forward_hook(lambda _, __, out: computed.add(out.dtype))
    first = mesh.rank("dp") * per_rank
    loss = runner.run_step(_batches(MICRO_BATCHES[first : first + per_rank]), LOSS_TOKENS, operations)
    assert not loss.requires_grad
    gradients = {
        name: weight.grad.full_tensor()
        for stage in stages
        for name, weight in stage.named_parameters()
        if isinstance(weight.grad, DTensor)
    }
    stored = {weight.dtype for stage in stages for weight in stage.parameters()}
    return {"loss": loss, "gradients": gradients, "computed": computed, "stored": stored | {loss.dtype}}


def _merged(results: list[dict[str, Any]]) -> tuple[float, dict[str, torch.Tensor]]:
    gradients = {name: grad for result in results for name, grad in result["gradients"].items()}
    return sum(float(result["loss"]) for result in results), gradients


@pytest.fixture(scope="module")
def exact() -> tuple[float, dict[str, torch.Tensor]]:
    return _merged(run_ranks(1, _run, Layout(), torch.float64))


def test_only_the_last_stage_knows_the_loss(exact: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert exact[0] == pytest.approx(np.log(CONFIG.shape.vocab_size), rel=0.02)  # a fresh model guesses
    results = run_ranks(2, _run, Layout(pp=2), torch.float64)
    assert float(results[0]["loss"]) == 0.0
    assert float(results[1]["loss"]) == pytest.approx(exact[0], rel=1e-12)


@pytest.mark.parametrize(
    "parallel", [Layout(dp=2), Layout(pp=2), Layout(pp=2, head="dealt")], ids=["dp2", "pp2", "pp2, dealt head"]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str)
def test_lower_precision_stays_close_to_float64(
    parallel: Layout,
    dtype: torch.dtype,
    tolerance: float,
    exact: tuple[float, dict[str, torch.Tensor]],
) -> None:
    results = run_ranks(2, _run, parallel, dtype)
    loss, gradients = _merged(results)
    assert loss == pytest.approx(exact[0], rel=tolerance)
    assert all((result["computed"], result["stored"]) == ({dtype}, {torch.float32}) for result in results)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    for name, gradient in exact[1].items():
        assert float((gradients[name] - gradient).norm() / gradient.norm()) < tolerance, name


def test_weight_gradients_put_off_are_added_in_float32_too() -> None:
    named = rank_operations("1f1b", 2, 4)
    parts = {
        op: [op._replace(kind=kind) for kind in INPUT + WEIGHT] for ops in named for op in ops if op.kind == BACKWARD
    }
    in_turn = tuple(tuple(one for op in ops for one in parts.get(op, [op])) for ops in named)
    in_a_row = tuple(
        (*(op for op in ops if op.kind != WEIGHT), *(op for op in ops if op.kind == WEIGHT)) for ops in in_turn
    )
    whole, parted, together = (
        _merged(run_ranks(2, _run, Layout(pp=2), torch.bfloat16, [operations]))[1]
        for operations in (named, in_turn, in_a_row)
    )
    for name, gradient in whole.items():
        assert torch.equal(parted[name], gradient), name
        if ".w" in name.removesuffix(".weight"):  # of a linear layer
            assert torch.equal(together[name], together[name].bfloat16().float()), name  # added once
            assert not torch.equal(together[name], gradient)


def test_gradients_of_a_dealt_head_are_added_in_float32_too() -> None:
    """They get the bits of a head on the last stage if one rank runs all of it; the other runs none."""
    forwards, heads, backwards = (
        [Operation(0, index, kind) for index in range(4)] for kind in (FORWARD, HEAD, BACKWARD)
    )
    last = tuple(op._replace(stage=1) for op in (*forwards, *backwards))
    on_first = (*forwards, *heads, *backwards), last
    on_last, dealt = (
        _merged(run_ranks(2, _run, layout, torch.bfloat16, operations))
        for layout, operations in ((Layout(pp=2), ()), (Layout(pp=2, head="dealt"), [on_first]))
    )
    for name, gradient in on_last[1].items():
        assert torch.equal(dealt[1][name], gradient), name


def _reductions_of_a_step(parallel: Layout) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _run(parallel, torch.float32)
    return sum(event.name == "c10d::_reduce_scatter_base_" for event in profiler.events() or ())


@pytest.mark.parametrize(("pp", "units"), [(1, 5), (2, 3)])  # FSDP units per rank: blocks and the rest
def test_gradients_are_reduced_once_per_step_not_per_micro_batch(pp: int, units: int) -> None:
    assert run_ranks(2 * pp, _reductions_of_a_step, Layout(dp=2, pp=pp)) == [units] * 2 * pp


def _debug_run() -> float:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    return float(_run(Layout(pp=2), torch.float32)["loss"])


def test_torch_debugging_does_not_mistake_lengths_for_errors() -> None:
    assert run_ranks(2, _debug_run)[1] > 0


def _gathers_before_embedding() -> tuple[int, int]:
    """Of the second step on this rank: gathers that start before the first embedding, and all."""
    parallel = Layout(pp=2, dp=2)
    mesh, device = build_mesh(parallel, "cpu"), torch.device("cpu")
    stages = build_stage_modules(CONFIG, parallel, mesh, Execution(device, torch.float32), seed=0)
    runner = PipelineRunner(stages, parallel, mesh, 2, Execution(device, torch.float32))
    runner.run_step(_batches(MICRO_BATCHES[:2]), LOSS_TOKENS)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        runner.run_step(_batches(MICRO_BATCHES[:2]), LOSS_TOKENS)
    events = profiler.events() or ()
    embedding = min((e.time_range.start for e in events if e.name == "aten::embedding"), default=float("inf"))
    gathers = [event.time_range.start for event in events if event.name == "c10d::_allgather_base_"]
    return sum(start < embedding for start in gathers), len(gathers)


def test_a_pipeline_rank_gathers_all_its_weights_before_its_first_forward() -> None:
    for early, gathers in run_ranks(4, _gathers_before_embedding)[:2]:  # the ranks of the first stage
        assert early == gathers == 3  # two blocks, and the rest of the stage
