"""The memory model: sums that follow from arithmetic, and directions that must hold everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from wlb.job.memory.layers import LayerMemory, MemorySettings
from wlb.job.memory.step import _Walk, predict_even_step, predict_memory, predict_rank_memory
from wlb.schedules.layout import Layout
from wlb.schedules.operations import rank_operations
from wlb.workload import ModelShape, model_shape

SHAPE = ModelShape(hidden=64, layers=8, heads=8, kv_heads=4, head_dim=8, ffn_hidden=176, vocab_size=512)
STRATEGIES = ("none", "selective", "full")


def job(parallel: Layout, micro_batches: int = 8, shape: ModelShape = SHAPE, **changes) -> MemorySettings:
    stages = parallel.stages
    blocks = tuple(shape.layers // stages for _ in range(stages))
    return MemorySettings(shape, blocks, parallel, micro_batches, **({"compute_bytes": 4} | changes))


def total(settings: MemorySettings, tokens: int) -> int:
    return predict_memory(settings, [tokens] * settings.micro_batches).total


@st.composite
def jobs(draw) -> MemorySettings:
    pp, virtual = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2)]))
    schedule = "interleaved_1f1b" if virtual > 1 else "1f1b"
    sizes = {name: draw(st.sampled_from([1, 2, 4])) for name in ("dp", "cp", "tp")}
    parallel = Layout(pp=pp, virtual_pp=virtual, schedule=schedule, **sizes)
    return job(
        parallel,
        compute_bytes=draw(st.sampled_from([2, 4, 8])),
        activation_checkpointing=draw(st.sampled_from(STRATEGIES)),
        fused_norms=draw(st.booleans()),
    )


def test_a_model_without_activations_is_weights_moments_and_gradients():
    """16 bytes for each of 7 billion parameters, on one process: float32 weights, two moments, gradients."""
    shape = model_shape("7b")
    parameters = shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.ffn_hidden + 2 * shape.hidden)
    parameters += 2 * shape.vocab_size * shape.hidden + shape.hidden
    parts = predict_memory(job(Layout(), 1, shape, compute_bytes=2), [1]).parts
    assert parts["weights"] == 4 * parameters
    assert parts["optimizer"] == 8 * parameters


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_long_micro_batches_add_up_only_where_they_are_in_flight_together(strategy):
    few_scores = replace(SHAPE, vocab_size=8)
    settings_ = job(Layout(pp=4), shape=few_scores, activation_checkpointing=strategy)
    long, short = 100_000, 1
    together = predict_memory(settings_, [long, short, short, long, *[short] * 4])
    apart = predict_memory(settings_, [long, short, short, short, long, *[short] * 3])
    assert together.pipeline_rank == 0  # later ranks have run one backward before the second one comes
    layers = LayerMemory(settings_, long)
    held = settings_.stage_blocks[0] * layers.block().held + layers.ends()
    assert together.total - apart.total == pytest.approx(held, rel=0.05)


def test_micro_batches_in_flight_are_those_of_the_schedule():
    """The first rank of 1F1B holds as many micro-batches as there are ranks."""
    tokens, pp = 10_000, 4
    settings_ = job(Layout(pp=pp), shape=replace(SHAPE, vocab_size=8))
    running = most = 0
    for operation in rank_operations("1f1b", pp, 8)[0]:
        running += -1 if operation.backward else 1
        most = max(most, running)
    assert most == pp
    layers = LayerMemory(settings_, tokens)
    expected = most * (settings_.stage_blocks[0] * layers.block().held + layers.ends())
    assert predict_memory(settings_, [tokens] * 8).parts["activations"] == expected


@settings(max_examples=examples(30), deadline=None)
@given(jobs(), st.integers(1, 5000))
def test_more_tokens_never_need_less(settings_, tokens):
    assert total(settings_, tokens) <= total(settings_, tokens + 64)


@settings(max_examples=examples(30), deadline=None)
@given(jobs(), st.integers(1000, 20_000))
def test_recomputing_more_never_needs_more(settings_, tokens):
    none, selective, full = (
        total(replace(settings_, activation_checkpointing=strategy), tokens) for strategy in STRATEGIES
    )
    assert full <= selective
    # Recomputing holds a block twice for a moment, which a stage of one or two blocks does not win back.
    assert selective <= none or max(settings_.stage_blocks) <= 2


@settings(max_examples=examples(20), deadline=None)
@given(jobs(), st.integers(1000, 20_000), st.sampled_from(["dp", "tp"]))
def test_more_ranks_never_need_more(settings_, tokens, dimension):
    parallel = settings_.parallel
    wider = replace(parallel, **{dimension: 2 * getattr(parallel, dimension)})
    if dimension == "tp" and wider.tp > SHAPE.kv_heads:
        return
    slack = 1.02 if parallel.dp * parallel.cp > 1 or dimension == "tp" else 1.2  # collectives have buffers
    assert total(replace(settings_, parallel=wider), tokens) <= slack * total(settings_, tokens)


@settings(max_examples=examples(30), deadline=None)
@given(jobs(), st.integers(1, 10_000), st.integers(1, 10), st.booleans())
def test_equal_micro_batches_are_walked_through_until_they_repeat(settings_, tokens, rounds, more):
    size = settings_.parallel.pp + (more and rounds < settings_.parallel.pp)  # of a round
    longer = replace(settings_, micro_batches=rounds * size)
    assert predict_even_step(longer, tokens) == predict_memory(longer, [tokens] * longer.micro_batches)


class _Forgetful(dict[Any, Any]):
    def get(self, key: Any, default: Any = None) -> None:
        return None


@settings(max_examples=examples(20))
@given(jobs(), st.lists(st.integers(0, 3), min_size=8, max_size=8), st.booleans())
def test_passes_that_begin_alike_change_what_is_held_alike(settings_, thousands, keeps_weights):
    settings_ = replace(settings_, keeps_weights=keeps_weights)
    rows = [1000 * count for count in thousands]
    for rank, of_rank in enumerate(settings_.parallel.operations(settings_.micro_batches)):
        each = _Walk(settings_, rank, [(count, None) for count in rows], passes=_Forgetful()).over(of_rank)
        assert predict_rank_memory(settings_, rows, rank) == each


def test_uneven_shards_count_as_longer_micro_batches_but_keep_no_more_of_other_ranks():
    parallel = Layout(cp=2)
    key_value_bytes = 2 * SHAPE.kv_heads * SHAPE.head_dim * 4
    received_less = SHAPE.layers * (1250 - 1000) // 2 * key_value_bytes
    assert total(job(parallel, uneven_shards=1.25), 1000) == total(job(parallel), 1250) - received_less
    assert total(job(Layout(), uneven_shards=1.25), 1000) == total(job(Layout()), 1000)


@pytest.mark.parametrize(("strategy", "keeps"), [("none", True), ("selective", True), ("full", False)])
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
    text = str(predict_memory(job(Layout(dp=2), 2, model_shape("7b"), compute_bytes=2), [8192, 8192]))
    assert "GiB (weights 12.6, optimizer 25.1, " in text
    for part in ("weights", "optimizer", "gradients", "activations"):
        assert part in text


def test_weights_that_are_kept_are_there_when_a_forward_has_left_its_activations():
    """Without a pipeline a forward frees the weights of its layers, and a backward begins with two of 8."""
    alone = job(Layout(dp=4), micro_batches=2)
    freed, kept = total(alone, 4096), total(replace(alone, keeps_weights=True), 4096)
    block = 4 * (2 * SHAPE.hidden * (SHAPE.hidden + 32) + 3 * SHAPE.hidden * SHAPE.ffn_hidden)
    assert 5 * block < kept - freed < 8 * block
    pipeline = job(Layout(dp=4, pp=2))
    assert total(pipeline, 8) == total(replace(pipeline, keeps_weights=True), 8)  # which keeps them anyhow
