from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import in_turn
from wlb.errors import UserError
from wlb.workload import HARDWARE, MODEL_SHAPES, make_workload, model_shape
from wlb.workload.base import Checkpointing, Direction
from wlb.workload.costs import PRODUCT_ROWS, QUERY_TILE
from wlb.workload.flops import attention_flops, linear_flops

PRESETS = [(model, hardware) for model in MODEL_SHAPES for hardware in HARDWARE]
WORKLOAD = make_workload("7b", "h100")
LENGTHS = np.array([0, 1, 2, 63, 100, 4096, 131_072])


@in_turn(("model", "hardware"), PRESETS)
def test_prices_grow_faster_than_length(model, hardware):
    workload = make_workload(model, hardware)
    lengths = np.arange(1, 3000)
    for price in (workload.attention_seconds, workload.document_seconds):
        seconds = price(lengths)
        assert price(0) == 0
        assert seconds[0] > 0
        assert np.all(np.diff(seconds / lengths) > 0)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (8, 2)])
def test_a_micro_batch_is_its_documents_and_a_constant(tp, cp):
    workload = make_workload("7b", tp=tp, cp=cp)
    lengths = np.array([5, 1000, 40_000])
    total = workload.attention_seconds(lengths).sum() + workload.linear_seconds(lengths.sum())
    constant = workload.linear_seconds(100_000) * 2 - workload.linear_seconds(200_000)
    assert workload.document_seconds(lengths).sum() + constant == pytest.approx(total)


def test_both_phases_are_forward_and_backward():
    workload = make_workload("llama3-8b", tp=2, cp=2)
    for price in (workload.attention_seconds, workload.linear_seconds):
        np.testing.assert_allclose(price(LENGTHS), price(LENGTHS, "forward") + price(LENGTHS, "backward"))
        assert np.all(price(LENGTHS[1:], "backward") > price(LENGTHS[1:], "forward"))


@in_turn(("model", "hardware"), PRESETS)
def test_no_gpu_beats_its_peak(model, hardware):
    shape, peak = MODEL_SHAPES[model], HARDWARE[hardware].peak_flops
    workload = make_workload(model, hardware)
    assert np.all(attention_flops(shape, LENGTHS) <= peak * workload.attention_seconds(LENGTHS))
    assert np.all(linear_flops(shape, LENGTHS) <= peak * workload.linear_seconds(LENGTHS))


def test_h100_attention_is_near_the_flash_attention_2_figure_of_another_publication():
    # Causal forward of 16 heads x 128 and 16K tokens on H100 (FlashAttention-3, arXiv 2407.08608): 335 TFLOP/s as one
    # document, and FlashAttention-3 616.
    shape = replace(model_shape("7b"), heads=16, kv_heads=16)
    for hardware, published in (("h100", 335e12), ("h100-fa3", 616e12), ("h100-cudnn", 539e12)):
        workload = make_workload(shape, hardware)
        seconds = workload.attention_seconds(16_384, "forward") + workload.drain_seconds(16_384, "forward")
        assert attention_flops(shape, 16_384, "forward") / seconds == pytest.approx(published, rel=0.07)


def test_draining_takes_as_many_tiles_of_one_head_whatever_the_group():
    shape = replace(model_shape("7b"), layers=3)
    hardware = HARDWARE["h100"]
    tiles = hardware.attention.drain_tiles * QUERY_TILE * np.array([0, 1000, 64_000])
    expected = 3 * 4 * shape.head_dim * tiles / hardware.attention.forward_flops
    for tp, cp in ((1, 1), (8, 1), (4, 4)):
        group = make_workload(shape, hardware, tp=tp, cp=cp)
        np.testing.assert_allclose(group.drain_seconds([0, 1000, 64_000], "forward"), expected)
        np.testing.assert_array_equal(group.drain_seconds([0, 1000], "backward"), [0.0, 0.0])
        assert float(group.drain_seconds(1000)) == float(group.drain_seconds(1000, "forward"))
    windowed = make_workload(replace(shape, sliding_window=1000), hardware)
    assert float(windowed.drain_seconds(64_000, "forward")) == pytest.approx(expected[1])


def test_groups_share_the_arithmetic():
    alone, group = make_workload("70b"), make_workload("70b", tp=8, cp=2)
    np.testing.assert_allclose(group.attention_seconds(LENGTHS), alone.attention_seconds(LENGTHS) / 16)
    assert alone.linear_seconds(10**5) / 16 < group.linear_seconds(10**5) < alone.linear_seconds(10**5)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_full_tiles_cost_what_their_pairs_cost(tiles):
    stops = QUERY_TILE * np.cumsum(tiles)
    seconds = WORKLOAD.piece_seconds(stops - QUERY_TILE * np.array(tiles), stops)
    assert seconds.sum() == pytest.approx(float(WORKLOAD.attention_seconds(stops[-1])))


@given(st.integers(1, 50_000), st.integers(1, QUERY_TILE))
def test_a_started_tile_costs_as_much_as_a_full_one(start, queries):
    partial, full = WORKLOAD.piece_seconds([start, start], [start + queries, start + QUERY_TILE])
    assert partial <= full * (1 + 1e-6)
    assert partial >= full / 2, "only the causal triangle of the tile may be cheaper"


@given(st.integers(1, 200_000))
def test_a_first_piece_is_a_document(length):
    for phase in ("forward", "backward", "both"):
        np.testing.assert_array_equal(
            WORKLOAD.piece_seconds(0, length, phase), WORKLOAD.attention_seconds(length, phase)
        )


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 16), (8, 4)])
def test_a_group_that_shares_evenly_also_exchanges_all_keys_and_values(tp, cp):
    tokens = 65_536
    alone, group = (make_workload("70b", tp=tp, cp=size) for size in (1, cp))
    exchanged = 2 * float(alone.exchange_seconds(tokens * (cp - 1) / cp, cp))
    expected = float(alone.linear_seconds(tokens / cp)) + exchanged
    assert float(group.linear_seconds(tokens)) == pytest.approx(expected)


def test_terms_add_up_to_w_l():
    kinds: tuple[tuple[Checkpointing, int], ...] = (("none", 1), ("keep_attention", 2), ("full", 2))
    for recomputed, forwards in kinds:
        costs = replace(make_workload("llama3-8b", tp=4), recomputed=recomputed)
        blocks = forwards * costs.blocks_seconds(5000, "forward") + costs.blocks_seconds(5000, "backward")
        expected = blocks + costs.head_seconds(5000) + (forwards + 1) * costs.tp_seconds(5000)
        assert costs.linear_seconds(5000) == pytest.approx(float(expected))
        attention = make_workload("llama3-8b", tp=4).attention_seconds(5000)
        again = costs.attention_seconds(5000, "forward") if recomputed == "full" else 0
        assert costs.attention_seconds(5000) == pytest.approx(float(attention + again))


@pytest.mark.parametrize(
    ("moved", "alone", "values"),
    [
        ((1000, 0, 0), False, 17),
        ((1000, 0, 0), True, 9),
        ((0, 1000, 0), True, 7),
        ((0, 0, 1000), False, 2 * 30),
        ((0, 0, 1000), True, 2 * 14),
    ],
)
def test_copies_follow_the_tokens_and_the_memory(moved, alone, values):
    workload = make_workload("llama3-8b")  # with 4 query heads for each key/value head
    sent, received, merged = moved
    both = 0.0
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        seconds = float(workload.copy_seconds(sent, received, merged, direction, alone))
        sent_more, received_more, merged_more = (np.multiply(m, [0, 0.5, 1]) for m in moved)
        more = workload.copy_seconds(sent_more, received_more, merged_more, direction, alone)
        np.testing.assert_allclose(more, np.multiply(seconds, [0, 0.5, 1]))
        both += seconds
    read_once = 1000 * 32 * 2 * 8 * 128 * 2 / HARDWARE["h100"].memory_bandwidth
    assert both == pytest.approx(values * read_once)


@in_turn(
    ("make", "message"),
    [
        (lambda: make_workload("8b"), "unknown model '8b'; choose from tiny, 550m, 7b, 30b, 70b, llama3-8b"),
        (
            lambda: make_workload(hardware="v100"),
            r"unknown hardware 'v100'; did you mean h100\? choose from a100",
        ),
        (lambda: make_workload(tp=3), "tp = 3 does not divide 32 query heads and 32 key/value heads"),
        (lambda: make_workload(tp=0), "tp = 0"),
        (lambda: make_workload(cp=-1), "cp = -1"),
        (lambda: replace(model_shape("tiny"), layers=0), "layers = 0"),
        (lambda: replace(model_shape("tiny"), kv_heads=3), "kv_heads = 3"),
    ],
)
def test_mistakes_are_named_in_one_line(make, message):
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@in_turn(("part", "weights"), [("blocks", 6.48e9), ("head", 32_000 * 4096)])
def test_a_weight_part_that_joins_a_product_copies_its_rows_and_does_not_accumulate(part, weights):
    accumulating = 2 * 4 * weights / WORKLOAD.hardware.memory_bandwidth
    few, some, many = WORKLOAD.joined_seconds([1, 512, 8192], part)
    assert few == pytest.approx(accumulating, rel=0.01)
    columns = 32 * (11 * 4096 + 3 * 11_008) if part == "blocks" else 4096 + 32_000
    copying = 512 * 2 * 2 * columns / WORKLOAD.hardware.memory_bandwidth
    assert some == pytest.approx(accumulating * (1 - 512 / PRODUCT_ROWS) - copying, rel=0.01)
    assert many == 0
    weight = WORKLOAD.weight_seconds([0, 1, 512], part)
    assert weight[0] == WORKLOAD.joined_seconds(0, part) == 0
    assert all(weight[1:] > [few, some])


def test_no_weight_part_has_products_of_experts():
    mixture = make_workload("mixtral-8x7b", "h100")
    shape = mixture.shape
    linear = shape.layers * shape.hidden * 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    adding = 2 * 4 * linear / mixture.hardware.memory_bandwidth
    products = 2 * linear / (mixture.hardware.peak_flops * mixture.hardware.gemm_efficiency)
    at_twice, at_once = mixture.weight_seconds([2**21, 2**20], "blocks")
    assert (at_twice - at_once) / 2**20 == pytest.approx(products, rel=0.05)
    assert mixture.joined_seconds(1, "blocks") == pytest.approx(adding, rel=0.01)
