"""Which links a group gets, against published measurements, and that everything is priced by the same ones."""

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.simulate import simulated_job
from wlb.simulate.costs import JobCosts
from wlb.workload import HARDWARE, make_workload, model_shape
from wlb.workload.links import Link, Traffic, group_link, shard_bytes

H100 = HARDWARE["h100"]
TRAFFIC: tuple[Traffic, ...] = get_args(Traffic)
GPU_HARDWARE = st.sampled_from([HARDWARE[name] for name in ("a100", "h100", "h200", "b200", "mi300x")])
DOCUMENTED = Path(__file__).with_name("published_measurements.md")


class Measured(NamedTuple):
    """A cell of the table of measurements: how nccl-tests and the model price one message."""

    name: str
    ranks: int
    on_a_node: int
    message_bytes: float
    predicted_us: float
    error: float

    @property
    def received_bytes(self) -> float:
        """What a rank receives from others."""
        if self.name == "point to point":
            return self.message_bytes
        return shard_bytes(self.message_bytes, self.ranks) * (2 if self.name == "all-reduce" else 1)

    @property
    def traffic(self) -> Traffic:
        kinds: dict[str, Traffic] = {"all-to-all": "all_to_all", "point to point": "point_to_point"}
        return kinds.get(self.name, "all_gather")


def measured() -> list[Measured]:
    """The table of published_measurements.md that starts with the column ``Traffic`` and has message sizes."""
    lines = [line.strip("| ").split("|") for line in DOCUMENTED.read_text(encoding="utf-8").splitlines()]
    rows = [[cell.strip() for cell in row] for row in lines if len(row) > 3]
    header = next(row for row in rows if row[:3] == ["Traffic", "Ranks", "of a node"])
    found = []
    for name, ranks, on_a_node, *cells in rows[rows.index(header) + 2 :]:
        for size, cell in zip(header[3:], cells, strict=False):
            if numbers := re.fullmatch(r"(\d+) / (\d+), ([+−])(\d+)%", cell):
                message = float(size.removesuffix(" MiB")) * 2**20
                predicted, time, sign, percent = numbers.groups()
                error = float(percent) / 100 * (1 if sign == "+" else -1)
                assert float(predicted) / float(time) - 1 == pytest.approx(error, abs=0.025)
                found.append(Measured(name, int(ranks), int(on_a_node), message, float(predicted), error))
    return found


@pytest.mark.parametrize(
    ("traffic", "size", "stride", "adapters"),
    [
        ("all_gather", 16, 8, 1),  # one rank on each node
        ("all_gather", 64, 1, H100.node_bandwidth / H100.network_bandwidth),  # no faster than NVLink
        ("all_gather", 4, 4, 2),
        ("all_gather", 8, 2, 4),
        ("all_to_all", 16, 8, 1),  # every byte leaves the node
        ("all_to_all", 8, 2, 7 / 4),  # 3 of 7 peers are reached by NVLink
        ("all_to_all", 16, 1, 15 / 8),
        ("point_to_point", 4, 4, 1),
        ("point_to_point", 2, 16, 1),
    ],
)
def test_how_many_adapters_carry_a_ranks_bytes(traffic, size, stride, adapters):
    assert group_link(H100, traffic, size, stride).bandwidth == pytest.approx(adapters * H100.network_bandwidth)


@given(GPU_HARDWARE, st.sampled_from(TRAFFIC), st.integers(2, 512), st.integers(1, 64), st.floats(1, 1e11))
def test_a_group_spread_over_more_nodes_is_never_faster(hardware, traffic, size, stride, count):
    near, far = (group_link(hardware, traffic, size, spread) for spread in (stride, stride + 1))
    assert far.bandwidth <= near.bandwidth * (1 + 1e-12)
    assert far.seconds(count) >= near.seconds(count) * (1 - 1e-12)


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_a_group_gets_the_link_of_where_it_lies(traffic):
    assert group_link(H100, traffic, 8, 1).bandwidth == group_link(H100, traffic, 2, 4).bandwidth == 345e9
    assert group_link(H100, traffic, 2, 4, nodes=2) == group_link(H100, traffic, 2, 8)
    assert group_link(H100, traffic, 16, 1, nodes=4) == group_link(H100, traffic, 16, 2)
    for size, stride in ((2, 1), (4, 2), (64, 1), (8, 8)):  # processes of one machine
        assert group_link(HARDWARE["cpu"], traffic, size, stride) == Link(100e-6, 1.7e9)


def test_nothing_takes_no_time():
    np.testing.assert_array_equal(Link(1.0, 2.0).seconds([0, 4]), [0.0, 3.0])


def test_published_measurements_are_met_as_documented():
    table = measured()
    assert len(table) > 50
    for cell in table:
        link = group_link(H100, cell.traffic, cell.ranks, stride=8 // cell.on_a_node)
        assert float(link.seconds(cell.received_bytes)) == pytest.approx(cell.predicted_us * 1e-6, abs=0.6e-6), cell
    errors = np.array([cell.error for cell in table if cell.name != "point to point" and cell.ranks < 80])
    assert np.sqrt(np.mean(errors**2)) < 0.08
    assert abs(np.median(errors)) < 0.03


@pytest.mark.parametrize(("tp", "cp"), [(2, 8), (1, 16), (8, 2), (2, 2)])
def test_the_exchange_costs_the_same_whoever_asks(tp, cp):
    shape, tokens = model_shape("llama3-8b"), 16_384
    token_bytes = 2 * shape.kv_heads * shape.head_dim * H100.bytes_per_value / tp
    link = group_link(H100, "all_to_all", cp, stride=tp)
    expected = shape.layers * float(link.seconds(tokens * token_bytes))
    assert float(make_workload(shape, tp=tp).exchange_seconds(tokens, cp)) == pytest.approx(expected)
    costs = JobCosts(simulated_job(shape, 131_072, "plain-4d", tp=tp, cp=cp))
    assert float(costs.rank.exchange_seconds(tokens, cp)) == pytest.approx(expected)


def test_the_simulation_and_the_workload_model_price_tensor_parallelism_alike():
    shape, tokens = replace(model_shape("7b"), vocab_size=8), 4096
    calls, values = 4 * shape.layers + 2, tokens * shape.hidden  # and around embedding and output head
    link = group_link(H100, "all_gather", 8, stride=1)
    expected = calls * float(link.seconds(shard_bytes(values * H100.bytes_per_value, 8)))
    costs = JobCosts(simulated_job(shape, 131_072, "plain-4d", tp=8))
    assert float(costs.rank.tp_seconds(tokens)) == pytest.approx(expected)
