"""What parallelising does to a model: sizes, types and memory, and blocks that are recomputed or compiled.

Every strategy computes the same numbers to the last bit, and attends as often as it says. Blocks are compiled once for
all lengths, and compute what they compute uncompiled.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from tests.schedules.by_chance import operations_by_chance
from tests.training.distributed import run_ranks
from wlb.attention import context_parallel_attention
from wlb.attention.exchange import send_keys
from wlb.job.config import Checkpointing
from wlb.models.experts import Routing
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.runtime.batch import Batch, RankSlice
from wlb.schedules.layout import Layout
from wlb.sharding import make_shard_plan
from wlb.training.parallel.mesh import build_mesh
from wlb.training.parallel.parallelize import (
    Execution,
    apply_activation_checkpointing,
    build_stage_modules,
    compile_blocks,
)
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.workload import ModelShape
from wlb.workload.shapes import Experts

CONFIG = TransformerConfig(
    ModelShape(hidden=14, layers=5, heads=4, kv_heads=2, head_dim=4, ffn_hidden=22, vocab_size=12)
)
SHAPE = ModelShape(hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn_hidden=20, vocab_size=31)
SEGMENTS = (5, 9, 1, 13)
# Exchanges of keys and values, a layer; what is received is kept.
EXCHANGES: dict[Checkpointing, int] = {"none": 1, "keep_attention": 1, "full": 2}
GRAPHS = 2  # what comes before attention in a block, and what comes after
LENGTHS = (41, 7, 23, 64, 41, 10, 3, 2, 57, 35)
LAYOUT = Layout(dp=2, pp=2, tp=2, virtual_pp=2, schedule="interleaved_1f1b", head="dealt")


def _weights(dtypes: Sequence[torch.dtype]) -> list[dict[str, tuple[torch.Tensor, torch.dtype, int]]]:
    return [_weights_as(dtype) for dtype in dtypes]


def _weights_as(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.dtype, int]]:
    """Of every parameter that this rank holds: its full value, its type, and how many values are stored here."""
    mesh = build_mesh(LAYOUT, "cpu")
    stages = build_stage_modules(CONFIG, LAYOUT, mesh, Execution(torch.device("cpu"), dtype), seed=4)
    held = {}
    for stage in stages:
        for name, weight in stage.named_parameters():
            assert isinstance(weight, DTensor)
            held[name] = (weight.full_tensor().detach(), weight.dtype, weight.to_local().numel())
    return held


def test_every_layout_starts_from_the_same_weights_kept_in_full_precision() -> None:
    kept_as = {torch.float64: torch.float64, torch.bfloat16: torch.float32}
    by_dtype = zip(*run_ranks(8, _weights, tuple(kept_as)), strict=True)
    for kept, by_rank in zip(kept_as.values(), by_dtype, strict=True):
        full = Transformer(CONFIG).to(kept)
        initialise_weights(full, layers=CONFIG.shape.layers, seed=4)
        for name, weight in full.named_parameters():
            holders = [held[name] for held in by_rank if name in held]
            copies = LAYOUT.pp if name.startswith("head") else 1
            assert len(holders) == copies * LAYOUT.dp * LAYOUT.tp, name
            assert all(torch.equal(value, weight) and stored == kept for value, stored, _ in holders), name
            copies *= LAYOUT.tp if name.endswith("norm.weight") else 1
            assert sum(count for _, _, count in holders) == copies * weight.numel(), name


def plain_model() -> Transformer:
    module = Transformer(TransformerConfig(SHAPE)).double()
    initialise_weights(module, layers=SHAPE.layers, seed=0)
    return module


def recomputed(strategy: Checkpointing) -> Transformer:
    module = plain_model()
    apply_activation_checkpointing(module, strategy)
    return module


def run_model(module: Transformer, cp: int, rank: int) -> None:
    """Forward and backward of one rank's tokens."""
    plan = make_shard_plan(SEGMENTS, cp, "per_sequence")
    positions = torch.from_numpy(plan.positions(rank))
    attend = partial(context_parallel_attention, shard_plan=plan, group=dist.group.WORLD)
    module(positions % SHAPE.vocab_size, positions, attend).square().sum().backward()


def _exchanges() -> list[int]:
    """Of keys and values in a forward and backward, by strategy."""
    counts = []
    for strategy in EXCHANGES:
        with mock.patch("wlb.attention.packed_attention.send_keys", wraps=send_keys) as send:
            run_model(recomputed(strategy), 2, dist.get_rank())
        counts.append(send.call_count)
    return counts


def test_only_full_attends_and_exchanges_twice() -> None:
    expected = [exchanges * SHAPE.layers for exchanges in EXCHANGES.values()]
    assert run_ranks(2, _exchanges) == [expected] * 2


def test_parameters_keep_their_names() -> None:
    none, keep_attention, full = (
        list(recomputed(strategy).state_dict()) for strategy in ("none", "keep_attention", "full")
    )
    assert none == keep_attention == full


@pytest.fixture
def nothing_is_compiled():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def train_on(module: Transformer, length: int, routing: Routing | None = None) -> Tensor:
    attend = partial(context_parallel_attention, shard_plan=make_shard_plan([length], 1, "per_sequence"), group=None)
    tokens = torch.arange(length)
    loss: Tensor = module(tokens % SHAPE.vocab_size, tokens, attend, routing).square().sum()
    loss.backward()
    return loss.detach()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("strategy", ["none", "keep_attention"])
def test_one_compilation_serves_every_length_and_every_block(strategy):
    plain, compiled = plain_model(), plain_model()
    compile_blocks(compiled, backend="aot_eager")  # traces forward and backward as inductor does, writes no code
    apply_activation_checkpointing(compiled, strategy)
    for length in LENGTHS:
        torch.testing.assert_close(train_on(compiled, length), train_on(plain, length), rtol=1e-12, atol=0)
        assert graphs() == GRAPHS
    for (name, weight), exact in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, exact.grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.usefixtures("nothing_is_compiled")
def test_lengths_that_pytorch_treats_apart_are_compiled_once():
    compiled = plain_model()
    compile_blocks(compiled, backend="aot_eager")
    apart = (1, SHAPE.hidden)
    for length in (*apart, *LENGTHS):
        train_on(compiled, length)
    compiled_graphs = graphs()
    assert compiled_graphs <= (len(apart) + 1) * GRAPHS
    for length in (*LENGTHS, *apart, 99):
        train_on(compiled, length)
    assert graphs() == compiled_graphs


@pytest.mark.usefixtures("nothing_is_compiled")
def test_one_compilation_serves_all_blocks_with_experts():
    config = TransformerConfig(replace(SHAPE, layers=2, experts=Experts(6, 2, 8, shared_hidden=4)))
    plain, compiled = Transformer(config), Transformer(config)
    for module in (plain, compiled):  # float32, for which one kernel computes all experts
        initialise_weights(module, layers=2, seed=0)
    compile_blocks(compiled, backend="aot_eager")
    graphs_after: list[int] = []  # each run of a block
    for block in compiled.layers.values():
        block.register_forward_hook(lambda *_: graphs_after.append(graphs()))
    for length in LENGTHS[:2]:
        routings = [Routing(length - 1, 0.1 / length, 0.2) for _ in range(2)]
        losses = [train_on(*pair) for pair in zip((plain, compiled), (length, length), routings, strict=True)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
        assert all(map(torch.equal, *(routing.counts.values() for routing in routings)))
    for weight, exact in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, exact.grad, rtol=1e-3, atol=1e-3)
    assert graphs_after == [graphs_after[0]] * 2 * config.shape.layers


BLOCKS = 2  # of a pipeline rank
VOCABULARY = 32
# Segment lengths of micro-batches; under tp each new number of tokens costs DTensor a plan of every operator.
STEPS = ([(9, 4), (13,), (7, 3, 3), (5,)], [(5,), (2, 11), (4, 1), (6, 7)])
RECOMPUTED_LAYOUTS = [
    Layout(dp=2),
    Layout(cp=2),
    Layout(tp=2),
    Layout(pp=2, virtual_pp=2, schedule="interleaved_1f1b"),
]


def _gradients(parallel: Layout, strategy: Checkpointing = "none") -> dict[str, Tensor]:
    """Loss and gradients of this rank after two steps of four micro-batches, by name."""
    mesh, device = build_mesh(parallel, "cpu"), torch.device("cpu")
    layers = BLOCKS * parallel.pp
    shape = ModelShape(hidden=16, layers=layers, heads=4, kv_heads=2, head_dim=4, ffn_hidden=20, vocab_size=VOCABULARY)
    execution = Execution(device, torch.float64)
    stages = build_stage_modules(
        TransformerConfig(shape), parallel, mesh, execution, seed=0, activation_checkpointing=strategy
    )
    runner = PipelineRunner(stages, parallel, mesh, 4, execution)
    found = {}
    for step, lengths in enumerate(STEPS):
        batches = []
        for segments in lengths:
            tokens = torch.arange(sum(segments)) * 7 % VOCABULARY
            positions = torch.cat([torch.arange(length) for length in segments])
            batch = Batch(tokens, tokens.roll(-1), positions, segments)
            batches.append(RankSlice(0, mesh.rank("cp"), parallel, "per_document", group=mesh.group("cp")).of(batch))
        by_chance = operations_by_chance(step, parallel.pp, parallel.virtual_pp, 4)
        found[f"loss of step {step}"] = runner.run_step(batches, 100, [by_chance] * parallel.dp)
    for stage in stages:
        for name, weight in stage.named_parameters():
            assert isinstance(weight.grad, DTensor)
            found[name] = weight.grad.to_local().clone()
    return found


def _largest_difference(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert found.keys() == exact.keys()
    differences = torch.cat([(found[name] - exact[name]).flatten() for name in exact])
    return float(differences.abs().max())  # NaN where any is


def _recomputed(layouts: list[Layout]) -> list[float]:
    differences: list[float] = []
    for parallel in layouts:
        exact = _gradients(parallel)
        strategies: tuple[Checkpointing, ...] = ("keep_attention", "full")
        differences += [_largest_difference(_gradients(parallel, strategy), exact) for strategy in strategies]
    return differences


def test_recomputation_changes_no_bit_in_any_layout():
    for differences in run_ranks(2, _recomputed, RECOMPUTED_LAYOUTS):
        assert differences == [0.0] * 2 * len(RECOMPUTED_LAYOUTS)
