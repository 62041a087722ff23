"""What windows, latents and experts change in prices, against counts made by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.errors import UserError
from wlb.workload import HARDWARE, Costs, ModelShape, make_workload, model_shape
from wlb.workload.base import Direction
from wlb.workload.costs import QUERY_TILE
from wlb.workload.flops import attention_flops, elementwise_values_per_token, linear_flops
from wlb.workload.links import group_link
from wlb.workload.shapes import BlockKind, Experts, Indexer, LatentAttention, LinearLayer
from wlb.workload.weights import parameters

H100 = HARDWARE["h100"]
DENSE = ModelShape(hidden=64, layers=6, heads=4, kv_heads=4, head_dim=16, ffn_hidden=96, vocab_size=50)
WINDOWED = replace(DENSE, sliding_window=40)
HYBRID = replace(WINDOWED, full_attention_every=3)
ROUTED = replace(DENSE, experts=Experts(8, 2, 32, shared_hidden=16, dense_layers=2))
LATENT = replace(DENSE, latent=LatentAttention(q_rank=24, kv_rank=20, rope_dim=4, value_dim=12))
PHASES: tuple[Direction, ...] = ("forward", "backward")
LINEAR = LinearLayer("gated_delta", heads=8, key_heads=4, key_dim=10, value_dim=14)
# Of six blocks one attends, one does so beside a linear layer, and two have no feed-forward layer.
MIXED = replace(DENSE, pattern="M-M*-H-MM-", linear=LINEAR)
INDEXED = replace(LATENT, indexer=Indexer(top_k=40, heads=3, head_dim=10, layers=2))


def seen(queries: range, window: int) -> int:
    """Query-key pairs, counted one by one."""
    return sum(min(query + 1, window) for query in queries)


@given(st.integers(0, 200), st.integers(1, 60))
def test_a_window_counts_every_query_with_the_keys_inside_it(length, window):
    shape = replace(HYBRID, sliding_window=window)
    of_pair = 2 * (2 * 4 * 16)
    pairs = 2 * seen(range(length), length) + 4 * seen(range(length), window)  # in 2 full blocks, and in 4
    assert attention_flops(shape, length, "forward") == of_pair * pairs


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 2000))
def test_pieces_of_a_document_are_priced_by_the_pairs_inside_the_window(start, tiles, window):
    workload = make_workload(replace(WINDOWED, sliding_window=window))
    start, stop = QUERY_TILE * start, QUERY_TILE * (start + tiles)
    one, two, three = workload.attention_seconds([10**6, 10**6 + 1, 1], "forward")  # of ``window`` pairs more, of one
    padding = (window * three - (two - one)) / (window - 1) if window > 1 else 0.0
    expected = (three - padding) * seen(range(start, stop), window) + padding * (stop - start)
    assert float(workload.piece_seconds(start, stop, "forward")) == pytest.approx(expected)


def test_blocks_of_both_kinds_are_priced_together_and_apart():
    lengths = np.array([10, 40, 41, 5000])
    full, windowed, both = (make_workload(shape) for shape in (DENSE, WINDOWED, HYBRID))
    for phase in ("forward", "backward", "both"):
        apart = full.attention_seconds(lengths, phase) / 3 + windowed.attention_seconds(lengths, phase) * 2 / 3
        np.testing.assert_allclose(both.attention_seconds(lengths, phase), apart)
    np.testing.assert_array_equal(full.linear_seconds(lengths), windowed.linear_seconds(lengths))
    assert windowed.attention_seconds(40) == pytest.approx(float(full.attention_seconds(40)))
    # Beyond the window every token costs the same.
    beyond = np.diff(windowed.attention_seconds(np.array([1000, 2000, 3000])))
    assert beyond[0] == pytest.approx(beyond[1])


def test_a_block_with_a_window_exchanges_as_much_as_one_without():
    np.testing.assert_array_equal(
        make_workload(HYBRID).exchange_seconds([100, 5000], 4), make_workload(DENSE).exchange_seconds([100, 5000], 4)
    )


def test_latent_attention_multiplies_keys_of_one_width_and_values_of_another():
    pairs = 100 * 101 / 2
    assert attention_flops(LATENT, 100, "forward") == 6 * 2 * 4 * (16 + 12) * pairs
    # Matrices as DeepSeek-V3 names them: q_a, q_b, kv_a, kv_b, o.
    projections = 64 * 24 + 24 * 4 * 16 + 64 * (20 + 4) + 20 * 4 * (12 + 12) + 4 * 12 * 64
    assert linear_flops(LATENT, 1, "forward") == 2 * (6 * (projections + 3 * 64 * 96) + 64 * 50)


@pytest.mark.parametrize("tp", [1, 4])
def test_of_latent_attention_the_latent_travels_whole_to_every_tensor_parallel_rank(tp):
    workload, link = make_workload(LATENT, tp=tp), group_link(H100, "all_to_all", 2, stride=tp)
    sent = 1000 * (20 + 4) * 2
    assert float(workload.exchange_seconds(1000, 2)) == pytest.approx(6 * (link.latency + sent / link.bandwidth))
    # What is received is copied, and expanded by kv_b: once forward, and its gradients backward.
    phases: tuple[tuple[Direction, int, int], ...] = (("forward", 2, 1), ("backward", 5, 2))
    for phase, copied, times in phases:
        expanded = 6 * times * 1000 * 2 * 20 * 4 * (12 + 12) / tp / (H100.peak_flops * H100.gemm_efficiency)
        expected = 6 * copied * sent / H100.memory_bandwidth + expanded
        assert float(workload.copy_seconds(0, 1000, 0, phase)) == pytest.approx(expected)


def test_only_blocks_with_attention_have_pairs_keys_and_values():
    lengths = np.array([100, 5000])
    dense, mixed = make_workload(DENSE), make_workload(MIXED)
    for phase in ("forward", "backward", "both"):
        np.testing.assert_allclose(mixed.attention_seconds(lengths, phase), dense.attention_seconds(lengths, phase) / 3)
    np.testing.assert_allclose(mixed.exchange_seconds(lengths, 4), dense.exchange_seconds(lengths, 4) / 3)
    np.testing.assert_allclose(mixed.drain_seconds(lengths), dense.drain_seconds(lengths) / 3)
    moved = [workload.copy_seconds(100, 200, 300, "forward") for workload in (mixed, dense)]
    assert moved[0] == pytest.approx(moved[1] / 3)


def test_a_linear_layer_costs_the_same_for_every_token():
    # Queries, keys, values, gate, two scalars for each head, and back; 8 operations for each value of its state.
    projections = 64 * (2 * 40 + 2 * 112 + 2 * 8) + 112 * 64
    attention, feed_forward = 64 * 16 * (4 + 4) * 2, 3 * 64 * 96
    matrices = 5 * projections + 2 * attention + 4 * feed_forward + 64 * 50
    assert linear_flops(MIXED, 1, "forward") == 2 * matrices + 5 * 8 * 8 * 10 * 14
    assert linear_flops(MIXED, 1000) == 1000 * linear_flops(MIXED, 1)


def test_a_linear_layer_also_moves_its_keys_and_values():
    # Halves of blocks: a norm and an addition each. Rotary embedding in two, SwiGLU in four, five linear layers.
    others = 10 * 5 * 64 + 2 * 2 * 16 * (4 + 4) + 4 * 3 * 96
    backward = 10 * 6 * 64 + 2 * 2 * 16 * (4 + 4) + 4 * 5 * 96
    mixing = 5 * (12 * 40 + 17.5 * 112)
    assert elementwise_values_per_token(MIXED, "forward") == others + mixing
    assert elementwise_values_per_token(MIXED, "backward") == backward + 5 * (21 * 40 + 44 * 112)
    gated = replace(DENSE, gated_attention=True, ffn_matrices=2)
    for backward, phase in enumerate(PHASES):
        more = elementwise_values_per_token(gated, phase) - elementwise_values_per_token(DENSE, phase)
        assert more == 6 * ((3 + 2 * backward) * 64 - (1 + backward) * 96)
    operations = linear_flops(MIXED, 1, "forward") - 2 * 64 * 50
    expected = operations / (H100.peak_flops * H100.gemm_efficiency) + 2 * (others + mixing) / H100.memory_bandwidth
    of_token = np.diff(make_workload(MIXED).blocks_seconds([10**6, 10**6 + 1], "forward"))[0]
    assert of_token == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("tokens", "chosen"), [(30, 30 * 31 / 2), (100, 40 * 41 / 2 + 40 * 60)])
def test_an_indexer_scores_every_pair_and_attention_is_over_the_tokens_it_chooses(tokens, chosen):
    scored, latent = 2 * 2 * 3 * 10, 6 * 2 * 4 * (2 * 20 + 4)  # all heads attend the latent itself
    forward = scored * tokens * (tokens + 1) / 2 + latent * chosen
    assert attention_flops(INDEXED, tokens, "forward") == forward
    backward = (2 * scored + 2.5 * latent) * chosen  # the indexer learns from chosen tokens alone
    assert attention_flops(INDEXED, tokens, "backward") == backward
    beyond = np.diff(make_workload(INDEXED).attention_seconds([10_000, 20_000, 30_000], "backward"))
    assert beyond[0] == pytest.approx(beyond[1])


def test_of_chosen_tokens_the_key_of_the_indexer_travels_too_and_nothing_is_expanded():
    workload, link = make_workload(INDEXED), group_link(H100, "all_to_all", 2, stride=1)
    sent = 1000 * (20 + 4 + 10) * 2
    assert float(workload.exchange_seconds(1000, 2)) == pytest.approx(6 * (link.latency + sent / link.bandwidth))
    assert float(workload.copy_seconds(0, 1000, 0, "forward")) == pytest.approx(6 * 2 * sent / H100.memory_bandwidth)


def test_a_block_without_a_feed_forward_layer_gathers_once():
    bare, whole = (make_workload(replace(DENSE, pattern=6 * block), tp=2) for block in ("*", "*-"))
    count, ends = np.array([1000]), 0.5
    assert (bare.tp_seconds(count) / whole.tp_seconds(count))[0] == pytest.approx((3 + ends) / (6 + ends))
    np.testing.assert_allclose(whole.linear_seconds(count), make_workload(DENSE, tp=2).linear_seconds(count))


def test_the_latent_of_deepseek_v3_is_as_large_as_published():
    # 70.272 KB of keys and values for each token: arXiv 2505.09343, Table 1.
    workload, link = make_workload("deepseek-v3"), group_link(H100, "all_to_all", 2, stride=1)
    seconds = float(workload.exchange_seconds(10**9, 2)) - 61 * link.latency
    assert seconds * link.bandwidth / 1e9 == pytest.approx(70_272)


def test_a_token_pays_for_its_experts_and_the_router():
    attention = 64 * 16 * (4 + 4) * 2
    routed = 3 * 64 * (2 * 32 + 16) + 64 * 8
    assert linear_flops(ROUTED, 1, "forward") == 2 * (6 * attention + 2 * 3 * 64 * 96 + 4 * routed + 64 * 50)
    np.testing.assert_array_equal(attention_flops(ROUTED, 100), attention_flops(DENSE, 100))


def expert_costs(**experts: Any) -> Costs:
    shape = replace(model_shape("mixtral-8x7b"), experts=replace(Experts(64, 4, 2048), **experts))
    return Costs(shape, H100)


def grouped_over_dense(width: int) -> float:
    """What one expert of this width costs a token of many, over a dense layer of the width."""
    dense, narrow = (replace(model_shape("7b"), ffn_hidden=columns) for columns in (width, 1))
    routed = replace(dense, experts=Experts(64, 1, width))
    of_routed, of_dense, rest = (
        float(np.diff(Costs(shape, H100).blocks_seconds([10**9, 2 * 10**9]))[0]) for shape in (routed, dense, narrow)
    )
    return (of_routed - rest) / (of_dense - rest)


def test_experts_as_wide_as_a_dense_layer_run_nearly_at_its_rate_and_narrow_ones_do_not():
    narrow, middle, wide = map(grouped_over_dense, (768, 2048, 14_336))
    assert narrow > 1.5 > middle > 1.2 > 1.08 > wide > 1.0


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_an_expert_costs_its_tokens_and_a_number_more(first, second):
    one, many = expert_costs(), expert_costs(count=128)
    assert one.blocks_seconds(first + second) < one.blocks_seconds(first) + one.blocks_seconds(second)
    assert many.blocks_seconds(first) > one.blocks_seconds(first)
    assert many.blocks_seconds(0) == one.blocks_seconds(0) == 0


def test_experts_on_a_latent_multiply_and_exchange_its_width():
    shape = replace(ROUTED, experts=replace(Experts(8, 2, 32, shared_hidden=16, dense_layers=2), latent=24))
    assert parameters(ROUTED) - parameters(shape) == 4 * (3 * (64 - 24) * 8 * 32 - 2 * 64 * 24)
    sent = [float(Costs(one, H100, ep=8).expert_seconds(10**9)) for one in (ROUTED, shape)]
    assert sent[1] == pytest.approx(sent[0] * 24 / 64, rel=1e-3)


def test_biases_of_experts_cost_time():
    plain, biased = (expert_costs(biased=one) for one in (False, True))
    assert biased.blocks_seconds(4096) > plain.blocks_seconds(4096)
    assert parameters(biased.shape) == parameters(plain.shape)


def test_kinds_of_blocks_lie_where_published_models_have_them():
    gemma, oss = (model_shape(name) for name in ("gemma3-27b", "gpt-oss-20b"))
    assert [layer for layer in range(62) if gemma.block_kind(layer).attention == "full"] == [*range(5, 62, 6)]
    assert [oss.block_kind(layer) for layer in (0, 1)] == [BlockKind("sliding", True), BlockKind("full", True)]
    first = replace(WINDOWED, full_attention_layers=2)
    assert [first.block_kind(layer).attention for layer in (0, 1, 2)] == ["full", "full", "sliding"]
    assert model_shape("deepseek-v3").blocks == {BlockKind("full", False): 3, BlockKind("full", True): 58}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window = 0; it must be at least 1"),
        ({"full_attention_every": 2}, "full_attention_every = 2 but no sliding_window"),
        ({"kv_heads": 2, "latent": LatentAttention(0, 8, 4, 16)}, "kv_heads = 2 for heads = 4"),
        ({"pattern": 5 * "*-"}, "'.*' for 6 layers; each is M"),
        ({"pattern": 6 * "-"}, "'------' for 6 layers; each is M"),
        ({"pattern": 6 * "M-"}, "give linear with M or H alone"),
        ({"pattern": 6 * "*E"}, "give experts with E alone"),
        ({"indexer": Indexer(8, 1, 8, 6)}, "without latent attention"),
        ({"experts": Experts(8, 9, 32)}, r"experts\.active = 9 of 8 experts"),
        ({"indexer": Indexer(0, 1, 8, 6), "latent": LATENT.latent}, r"indexer\.top_k = 0; it must be at least 1"),
        ({"pattern": 6 * "*-", "sliding_window": 8}, "leave sliding_window, indexer out"),
    ],
)
def test_variants_that_do_not_go_together_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        replace(DENSE, **change)
