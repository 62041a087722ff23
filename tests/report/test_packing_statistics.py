"""Running totals against the same figures computed from the plans at the end."""

import statistics

import pytest
from hypothesis import given

from tests.packing.streams import SETTINGS, packer_for, segments_of, streams
from wlb.report.packing import PackingStatistics


@SETTINGS
@given(streams())
def test_totals_are_what_the_plans_hold(stream):
    lengths = stream[2]
    packer = packer_for(stream)
    plans, tail = packer.plan(lengths), packer.drain()
    totals = PackingStatistics()
    for start in range(0, len(plans), 2):
        totals.add(plans[start : start + 2])
    totals.add_tail(tail)

    assert [row for plan in plans for row in plan.table.tolist()] == [[*s] for s in segments_of(plans)]
    assert totals.steps == len(plans)
    assert totals.tokens == sum(segment.length for segment in segments_of(plans + tail)) == sum(lengths)
    assert totals.longest_delay == max([plan.longest_delay for plan in plans + tail], default=0)
    delay = sum(plan.delay_token_steps for plan in plans + tail)
    assert totals.mean_token_delay == (delay / sum(lengths) if lengths else 0.0)
    if plans:
        degrees = []
        for plan in plans:
            workloads = [micro_batch.workload for micro_batch in plan.micro_batches]
            degrees.append(max(workloads) / statistics.fmean(workloads))
        assert totals.imbalance_degree == pytest.approx(statistics.fmean(degrees))
        tokens = [plan.tokens for plan in plans]
        assert totals.tokens_per_step_cv == pytest.approx(statistics.pstdev(tokens) / statistics.fmean(tokens))


def test_nothing_planned_is_balanced_and_undelayed():
    totals = PackingStatistics()
    assert (totals.steps, totals.tokens, totals.longest_delay) == (0, 0, 0)
    assert (totals.imbalance_degree, totals.mean_token_delay, totals.tokens_per_step_cv) == (1.0, 0.0, 0.0)
