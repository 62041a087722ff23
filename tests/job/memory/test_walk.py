"""The memory model: sums that follow from arithmetic, of dense models and others, and directions that always hold."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from wlb.job.job import Job
from wlb.job.memory.fit import predicted_memory
from wlb.job.memory.layers import LayerMemory
from wlb.job.memory.walk import MemoryEstimate, Walk, predict_memory
from wlb.schedules.layout import Layout, split_layers
from wlb.schedules.operations import FORWARD, HEAD, Operation, rank_operations
from wlb.simulate import simulated_job
from wlb.workload import ModelShape, hardware_preset, model_shape
from wlb.workload.shapes import BlockKind, Experts, LatentAttention
from wlb.workload.weights import parameters

SHAPE = ModelShape(hidden=64, layers=8, heads=8, kv_heads=4, head_dim=8, ffn_hidden=176, vocab_size=512)
STRATEGIES = ("none", "keep_attention", "full")


def job(
    layout: Layout = Layout(),
    micro_batches: int = 8,
    shape: ModelShape = SHAPE,
    window: int = 4096,
    dtype: str = "float32",
    hardware: str = "cpu",
    **changes: Any,
) -> Job:
    """A job whose ranks hold equal shares; ``micro_batches`` are those of a data-parallel rank."""
    rates = hardware_preset(hardware).computing_in(dtype)
    given: dict[str, Any] = {"hardware": rates, "micro_batches": micro_batches, "sharding": "per_document"}
    return replace(simulated_job(shape, window, "plain-4d", **given, **vars(layout)), **changes)


def freeing(job: Job) -> Job:
    """The same with weights that every pass gathers again."""
    return replace(job, layout=replace(job.layout, weights="gathered"))


def total(job: Job, tokens: int) -> int:
    return predict_memory(job, [tokens] * job.rank_micro_batches).total


def of_rank(job: Job, rows: list[int], rank: int) -> MemoryEstimate:
    return Walk(job).over(rank, [(count, None) for count in rows], job.layout.operations(len(rows))[rank])


def stage_blocks(job: Job) -> list[int]:
    return [len(blocks) for blocks in split_layers(job.shape, job.layout)]


@st.composite
def jobs(draw) -> Job:
    pp, virtual = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2)]))
    schedule = "interleaved_1f1b" if virtual > 1 else "1f1b"
    sizes = {name: draw(st.sampled_from([1, 2, 4])) for name in ("dp", "cp", "tp")}
    parallel = Layout(pp=pp, virtual_pp=virtual, schedule=schedule, **sizes)
    return job(
        parallel,
        dtype=draw(st.sampled_from(["bfloat16", "float32", "float64"])),
        activation_checkpointing=draw(st.sampled_from(STRATEGIES)),
        hardware=draw(st.sampled_from(["cpu", "h100"])),
    )


def test_a_model_without_activations_is_weights_moments_and_gradients():
    """16 bytes for each of 7 billion parameters, on one process: float32 weights, two moments, gradients."""
    shape = model_shape("7b")
    parameters = shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.ffn_hidden + 2 * shape.hidden)
    parameters += 2 * shape.vocab_size * shape.hidden + shape.hidden
    parts = predict_memory(job(Layout(), 1, shape, dtype="bfloat16"), [1]).parts
    assert parts["weights"] == 4 * parameters
    assert parts["optimizer"] == 8 * parameters


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_long_micro_batches_add_up_only_where_they_are_in_flight_together(strategy):
    few_scores = replace(SHAPE, vocab_size=8)
    job_ = job(Layout(pp=4), shape=few_scores, activation_checkpointing=strategy)
    long, short = 100_000, 1
    together = predict_memory(job_, [long, short, short, long, *[short] * 4])
    apart = predict_memory(job_, [long, short, short, short, long, *[short] * 3])
    assert together.pipeline_rank == 0  # later ranks have run one backward before the second one comes
    layers = LayerMemory(job_, long)
    held = stage_blocks(job_)[0] * layers.block().held + layers.ends()
    assert together.total - apart.total == pytest.approx(held, rel=0.05)


def test_micro_batches_in_flight_are_those_of_the_schedule():
    """The first rank of 1F1B holds as many micro-batches as there are ranks."""
    tokens, pp = 10_000, 4
    job_ = job(Layout(pp=pp), shape=replace(SHAPE, vocab_size=8))
    running = most = 0
    for operation in rank_operations("1f1b", pp, 8)[0]:
        running += 1 if operation.kind == FORWARD else -1
        most = max(most, running)
    assert most == pp
    layers = LayerMemory(job_, tokens)
    expected = most * (stage_blocks(job_)[0] * layers.block().held + layers.ends())
    assert predict_memory(job_, [tokens] * 8).parts["activations"] == expected


@settings(max_examples=examples(30), deadline=None)
@given(jobs(), st.integers(1, 5000))
def test_more_tokens_never_need_less(job_, tokens):
    assert total(job_, tokens) <= total(job_, tokens + 64)


@settings(max_examples=examples(30), deadline=None)
@given(jobs(), st.integers(1000, 20_000))
def test_recomputing_more_never_needs_more(job_, tokens):
    none, keep_attention, full = (
        total(replace(job_, activation_checkpointing=strategy), tokens) for strategy in STRATEGIES
    )
    assert full <= keep_attention
    # Recomputing holds a block twice for a moment, which a stage of one or two blocks does not win back.
    assert keep_attention <= none or max(stage_blocks(job_)) <= 2


@settings(max_examples=examples(20), deadline=None)
@given(jobs(), st.integers(1000, 20_000), st.sampled_from(["dp", "tp"]))
def test_more_ranks_never_need_more(job_, tokens, dimension):
    layout = job_.layout
    wider = replace(layout, **{dimension: 2 * getattr(layout, dimension)})
    if dimension == "tp" and wider.tp > SHAPE.kv_heads:
        return
    slack = 1.02 if layout.dp_cp > 1 or dimension == "tp" else 1.2  # collectives have buffers
    count = job_.rank_micro_batches
    wide = replace(job_, layout=wider, packing=job_.packing.changed(global_batch=count * wider.dp))
    assert total(wide, tokens) <= slack * total(job_, tokens)


@settings(max_examples=examples(30), deadline=None)
@given(jobs(), st.integers(1, 10_000), st.integers(1, 10), st.booleans())
def test_equal_micro_batches_are_walked_through_until_they_repeat(job_, tokens, rounds, more):
    size = job_.layout.pp + (more and rounds < job_.layout.pp)  # of a round
    packing = job_.packing.changed(global_batch=rounds * size * job_.layout.dp)
    longer = replace(job_, packing=packing, data=job_.data.model_copy(update={"context_window": tokens}))
    assert predicted_memory(longer) == predict_memory(longer, [tokens] * longer.rank_micro_batches)


@settings(max_examples=examples(30), deadline=None)
@given(jobs(), st.sampled_from([64, 4096]))
def test_no_rank_that_is_left_out_holds_most(job_, tokens):
    rows = [tokens] * job_.rank_micro_batches
    every_rank = [of_rank(job_, rows, rank).total for rank in range(job_.layout.pp)]
    assert max(every_rank) == max(every_rank[rank] for rank in Walk(job_).like_ranks)


@pytest.mark.parametrize(("strategy", "keeps"), [("none", True), ("keep_attention", True), ("full", False)])
def test_a_block_keeps_an_even_share_of_received_keys_and_values(strategy, keeps):
    rows = 1000
    alone, group = (
        LayerMemory(job(Layout(cp=cp), activation_checkpointing=strategy), rows).block().held for cp in (1, 8)
    )
    assert group - alone == keeps * rows * 2 * SHAPE.kv_heads * SHAPE.head_dim * 4


def test_a_checkpoint_copy_is_weights_and_moments_again():
    plain, copied = (job(Layout(dp=2), checkpoint_copy=copy) for copy in (False, True))
    parts = predict_memory(plain, [1000] * 8).parts
    assert total(copied, 1000) - total(plain, 1000) == parts["weights"] + parts["optimizer"]


def test_the_estimate_says_what_it_is_made_of():
    text = str(predict_memory(job(Layout(dp=2), 2, model_shape("7b"), dtype="bfloat16"), [8192, 8192]))
    assert "GiB (weights 12.6, optimizer 25.1, " in text
    for part in ("weights", "optimizer", "gradients", "activations"):
        assert part in text


def test_weights_that_are_kept_are_there_when_a_forward_has_left_its_activations():
    """Without a pipeline a forward frees the weights of its layers, and a backward begins with two of 8."""
    alone = job(Layout(dp=4), micro_batches=2)
    freed, kept = total(freeing(alone), 4096), total(alone, 4096)
    block = 4 * (2 * SHAPE.hidden * (SHAPE.hidden + 32) + 3 * SHAPE.hidden * SHAPE.ffn_hidden)
    assert 5 * block < kept - freed < 8 * block


DENSE = ModelShape(hidden=64, layers=6, heads=8, kv_heads=8, head_dim=16, ffn_hidden=96, vocab_size=64)
ROUTED = replace(DENSE, experts=Experts(8, 2, 32, shared_hidden=16, dense_layers=2))
LATENT = replace(DENSE, latent=LatentAttention(q_rank=24, kv_rank=20, rope_dim=4, value_dim=12))
WINDOWED = replace(DENSE, full_attention_every=3, sliding_window=16)
ROWS = 128


def of_shape(shape: ModelShape, **layout: Any) -> Job:
    return job(Layout(**layout), shape=shape, dtype="bfloat16")


def held(shape: ModelShape, kind: BlockKind, **layout: Any) -> int:
    return LayerMemory(of_shape(shape, **layout), ROWS).block(kind).held


@pytest.mark.parametrize("shape", [DENSE, ROUTED, LATENT, WINDOWED])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_weight_is_held_whether_a_token_meets_it_or_not(shape, tp):
    norms = (2 * shape.layers + 1) * shape.hidden
    parts = predict_memory(of_shape(shape, tp=tp), [1]).parts
    assert parts["weights"] == 4 * (parameters(shape) // tp + norms)


def test_a_dealt_head_leaves_its_gradient():
    job_ = job(Layout(pp=4, head="dealt"))
    begun = [Operation(1, 0, FORWARD), Operation(1, 0, HEAD)]
    parts = Walk(job_).over(1, [(1, None)] * 8, begun).parts
    assert parts["gradients"] == 4 * (SHAPE.vocab_size + 1) * SHAPE.hidden
    assert of_rank(job_, [1] * 8, 1).parts["gradients"] == parts["weights"]


def test_the_first_stage_holds_the_blocks_without_experts():
    layers = LayerMemory(of_shape(ROUTED, pp=2), ROWS)
    dense, routed = (layers.block(BlockKind("full", is_routed)).weights for is_routed in (False, True))
    assert [unit.weights for unit in layers.blocks(range(3))] == [dense, dense, routed]
    assert [unit.weights for unit in layers.blocks(range(3, 6))] == [routed] * 3


def test_a_block_holds_tokens_as_experts_get_and_return_them():
    dense, routed = (held(ROUTED, BlockKind("full", is_routed)) for is_routed in (False, True))
    columns = 4 * 2 * (2 * 32 + 16 - 96)  # SwiGLU's four tensors, in two bytes
    chosen, scores = 2 * (3 * 8 + 4 + 2), (2 * 8 + 3) * 4  # index, place there and back, weight; all scores and sums
    assert routed - dense == ROWS * (columns + 2 * 2 * 2 * 64 + chosen + scores)


def test_of_other_ranks_latents_are_kept_and_not_what_they_expand_to():
    kind = BlockKind("full", False)
    assert held(LATENT, kind, cp=2) - held(LATENT, kind) == ROWS * (20 + 4) * 2
    assert held(DENSE, kind, cp=2) - held(DENSE, kind) == ROWS * 2 * 8 * 16 * 2


def test_a_window_saves_no_memory():
    assert held(WINDOWED, BlockKind("sliding", False), cp=2) == held(DENSE, BlockKind("full", False), cp=2)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=4), Layout(pp=2, virtual_pp=2), Layout(pp=2, virtual_pp=4)])
def test_pipeline_ranks_together_hold_each_weight_once(layout: Layout):
    ranks = [of_rank(job(layout), [64] * 8, rank).parts["weights"] for rank in range(layout.pp)]
    assert sum(ranks) == of_rank(job(), [64] * 8, 0).parts["weights"]


class Forgetful(dict[Any, Any]):
    def __contains__(self, key: object) -> bool:
        return False


@settings(max_examples=examples(20), deadline=None)
@given(jobs(), st.lists(st.sampled_from([0, 1, 64, 4096]), min_size=8, max_size=8), st.booleans())
def test_passes_that_a_walk_remembers_change_memory_as_if_walked_again(job: Job, rows: list[int], frees: bool):
    job = freeing(job) if frees and job.layout.pp == 1 else job
    forgetful = Walk(job)
    forgetful.passes, forgetful.known = Forgetful(), Forgetful()
    assert Walk(job).unlike_ranks(rows) == forgetful.unlike_ranks(rows)
