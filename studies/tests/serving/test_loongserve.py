"""LoongServe: prompts whole, groups apart, degrees from an exact programme, nobody passed over, no migration."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.tests.serving.jobs import job_of, jobs
from wlb.workload import Costs, ModelShape, hardware_preset, make_workload
from wlb.workload.links import group_link
from wlb_studies.serving.loongserve import SequencePrices, divide, loongserve

PRICES = SequencePrices(make_workload("llama3-8b"))


def all_divisions(prompts: int, instances: int) -> Iterator[list[tuple[int, int]]]:
    """Rows of (prompts, instances) of groups."""
    if prompts == 0:
        yield []
    for count in range(1, prompts + 1):
        for degree in range(1, instances + 1):
            for others in all_divisions(prompts - count, instances - degree):
                yield [(count, degree), *others]


def waiting_by_token(lengths: np.ndarray, groups: list[tuple[int, int]], prices: SequencePrices) -> float:
    """The sum over prompts of their group's seconds over their length."""
    cost, first = 0.0, 0
    for count, degree in groups:
        group = lengths[first : first + count]
        attention = prices.workload.attention_seconds(group, "forward").sum()
        cost += float(prices.seconds(attention, group.sum(), degree)) * (1 / group).sum()
        first += count
    return cost


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=5), st.integers(1, 4))
def test_the_division_is_as_good_as_any(lengths: list[int], instances: int):
    descending = np.array(sorted(lengths, reverse=True))
    groups = divide(descending, PRICES, instances)
    assert sum(count for count, _ in groups) == len(lengths)
    assert sum(degree for _, degree in groups) <= instances
    best = min(waiting_by_token(descending, way, PRICES) for way in all_divisions(len(lengths), instances))
    assert waiting_by_token(descending, groups, PRICES) == pytest.approx(best)


@given(jobs())
def test_prompts_run_whole_in_groups_that_share_no_instance(job):
    run = loongserve(job)
    instances = job.gpus // job.tp
    held = [(each.start, each.end, each.engine, each.engine + each.group.cp) for each in run.passes]
    assert all(0 <= first < stop <= instances for *_, first, stop in held)
    for n, (start, end, first, stop) in enumerate(held):
        for other_start, other_end, other_first, other_stop in held[:n]:
            together = start < other_end - 1e-12 and other_start < end - 1e-12
            assert not together or stop <= other_first or other_stop <= first
    for each in run.passes:
        assert all(chunk.start == 0 and chunk.stop == job.lengths[chunk.prompt] for chunk in each.batches[0])
        assert each.group.tp == job.tp
    # Nothing migrates: a group starts the moment a prompt arrives or another group ends, whatever its degree.
    moments = np.array([*job.arrivals, *(each.end for each in run.passes)])
    assert all(np.abs(moments - each.start).min() < 1e-9 for each in run.passes)


@given(jobs())
def test_the_oldest_prompt_is_in_every_macro_iteration(job):
    """One begins whenever no group is at work; whoever has waited longest then is not passed over."""
    run = loongserve(job)
    start = np.empty(len(job.lengths))
    for each in run.passes:
        start[[chunk.prompt for chunk in each.batches[0]]] = each.start
    for now in {each.start for each in run.passes}:
        if all(each.end <= now for each in run.passes if each.start < now):
            oldest = np.flatnonzero((job.arrivals <= now) & (start >= now))[0]
            assert start[oldest] == now


class Affine(Costs):
    """W_l of 0.25 s and 10 us a token."""

    def linear_seconds(self, tokens, phase="both"):
        return 0.25 + 1e-5 * np.asarray(tokens)


def test_degree_two_by_hand():
    """Two instances share 8,192 tokens: each holds 4,096, attends half and receives the other half."""
    shape = ModelShape(hidden=64, layers=2, heads=2, kv_heads=2, head_dim=16, ffn_hidden=128, vocab_size=100)
    hardware = hardware_preset("h100")
    prices = SequencePrices(Affine(shape, hardware))
    attention = 1e-9 * 8192 * 8193 / 2  # 33.6 ms, of which each instance has 16.8 ms, half of it over its own keys
    # K and V of a token in a layer: 2 x 2 x 16 values of 2 bytes. Two layers, 4,096 tokens, over NVLink.
    link = group_link(hardware, "all_to_all", 2, stride=1)
    exchange = 2 * float(link.seconds(4096 * 128))
    # One part: 4 x sent and 2 x received in memory, and 17 values for each of the 4,096 queries that merge two outputs.
    copies = 2 * (4096 * 128 * 6 + 4096 * 17 * 2 * 16 * 2) / hardware.memory_bandwidth
    alone = attention + 0.25 + 8192 * 1e-5
    shared = max(attention / 2, exchange + attention / 4) + 0.25 + 4096 * 1e-5 + copies
    seconds = [float(prices.seconds(attention, 8192, degree)) for degree in (1, 2)]
    assert seconds == pytest.approx([alone, shared])
    assert exchange < attention / 4, "the exchange is hidden"
    # A single prompt takes what is faster; of two equal ones, each would be slower with the other.
    assert divide(np.array([8192]), prices, 2) == [(1, 2)]
    assert divide(np.array([8192, 8192]), prices, 2) == [(1, 1), (1, 1)]


def rows(job) -> list[tuple[list[int], int, int, float]]:
    """Prompts, instances, the first of these and the start of every group."""
    passes = loongserve(job).passes
    return [([chunk.prompt for chunk in each.batches[0]], each.group.cp, each.engine, each.start) for each in passes]


def test_one_instance_serves_in_order_of_arrival_up_to_its_budget():
    first, second = rows(job_of([3000, 500, 700, 200], budget=3500))
    assert (first[0], second[0]) == ([0, 1], [2, 3])


def test_a_group_that_is_done_early_takes_what_it_can_finish_and_the_next_degree_is_chosen_anew():
    """Prompts 0 and 1 take an instance each. The second one is soon free, and a short prompt that arrives takes it; the
    long prompt 3 would hold it beyond the end of prompt 0, waits for that, and gets both instances.
    """
    job = job_of([60_000, 500, 500, 60_000], arrivals=[0.0, 0.0, 0.1, 0.2], budget=64_000, dp=2)
    end = PRICES.seconds(PRICES.workload.attention_seconds(60_000, "forward"), 60_000, 1)
    assert rows(job) == [([0], 1, 0, 0.0), ([1], 1, 1, 0.0), ([2], 1, 1, 0.1), ([3], 2, 0, pytest.approx(float(end)))]
