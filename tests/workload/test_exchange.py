"""What exchanging keys and values costs."""

from dataclasses import replace

import numpy as np
import pytest

from wlb.workload import HARDWARE, make_workload, model_shape
from wlb.workload.links import group_link


def test_nothing_to_receive_costs_nothing():
    np.testing.assert_array_equal(make_workload().kv_gather_seconds([0, 0], 4), [0.0, 0.0])


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 16), (8, 4)])
def test_gathering_everything_is_what_context_parallel_prices_contain(tp, cp):
    # make_workload(cp=...) prices balanced shards: a share of everything, and K and V of all other ranks' tokens.
    tokens = 65_536
    no_tp_traffic = replace(HARDWARE["h100"], node_latency=0.0, network_latency=0.0, step_latency=0.0)
    alone, group = (make_workload("70b", no_tp_traffic, tp=tp, cp=size) for size in (1, cp))
    tp_seconds = (
        0.0
        if tp == 1
        else float(alone.linear_seconds(tokens) - make_workload("70b", no_tp_traffic).linear_seconds(tokens) / tp)
    )
    shares = float(make_workload("70b", no_tp_traffic).linear_seconds(tokens)) / (tp * cp) + tp_seconds / cp
    gathered = float(alone.kv_gather_seconds(tokens * (cp - 1) / cp, cp))
    assert float(group.linear_seconds(tokens)) == pytest.approx(shares + gathered)


def test_bytes_follow_the_shape_and_latency_is_paid_in_every_layer():
    inside = group_link(HARDWARE["h100"], "all_to_all", 4, stride=2)
    shape = replace(model_shape("llama3-8b"), layers=3)
    seconds = make_workload(shape, tp=2).kv_gather_seconds(1000, 4)
    sent = 1000 * 2 * 8 * 128 / 2 * 2  # tokens x (K, V) x heads x head_dim / tp x bytes
    assert float(seconds) == pytest.approx(2 * 3 * (inside.latency + sent / inside.bandwidth))
    assert make_workload(shape, tp=2).kv_gather_seconds(1000, 8) > 2 * seconds, "across nodes"


@pytest.mark.parametrize(("moved", "values"), [((1000, 0, 0), 17), ((0, 1000, 0), 7), ((0, 0, 1000), 2 * 34)])
def test_copies_follow_the_tokens_and_the_memory(moved, values):
    workload = make_workload("llama3-8b")  # with 4 query heads for each key/value head
    both = workload.kv_copy_seconds(*moved)
    np.testing.assert_allclose(
        workload.kv_copy_seconds(*(np.multiply(m, [0, 0.5, 1]) for m in moved)), np.multiply(both, [0, 0.5, 1])
    )
    phases = (workload.kv_copy_seconds(*moved, phase=phase) for phase in ("forward", "backward"))
    assert sum(map(float, phases)) == pytest.approx(float(both))
    read_once = 1000 * 32 * 2 * 8 * 128 * 2 / HARDWARE["h100"].memory_bandwidth
    assert float(both) == pytest.approx(values * read_once)
