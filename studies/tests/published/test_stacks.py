"""What experts on several ranks and overlapping collectives cost, against counts made by hand."""

import re
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulate.jobs import SHAPE, WINDOW, documents
from wlb.errors import UserError
from wlb.job.planner import StepPlanner
from wlb.simulate import simulated_job
from wlb.simulate.costs import JobCosts
from wlb.simulate.step import Steps
from wlb.workload import HARDWARE, hardware_preset
from wlb.workload.shapes import Experts
from wlb_studies.published.stacks import StackCosts, StackSoftware, attention_kernel, narrow_rate

LAYOUT: dict[str, Any] = {"dp": 2, "cp": 2, "pp": 2, "tp": 2}
ROUTED = replace(SHAPE, experts=Experts(16, 2, 512, shared_hidden=512, dense_layers=1))


def costs_of(software: StackSoftware, **layout: int) -> JobCosts:
    sizes = LAYOUT | layout
    job = simulated_job(ROUTED, WINDOW, "plain-4d", micro_batches=2, software=software, **sizes)
    return JobCosts(job)


def test_narrow_types_speed_up_the_matrix_products_of_blocks_alone():
    plain, narrow = (costs_of(StackSoftware(block_rate=rate)).rank for rate in (1.0, narrow_rate("h200", "fp8")))
    assert narrow.blocks_seconds(4096, "forward") < plain.blocks_seconds(4096, "forward")
    assert narrow.piece_seconds(0, 4096, "forward") == plain.piece_seconds(0, 4096, "forward")
    assert narrow.head_seconds(4096, "forward") == plain.head_seconds(4096, "forward")
    # What grouping costs is not computed in FP8, so FP8 helps experts less.
    gained = [
        StackCosts(shape, HARDWARE["h100"], software=StackSoftware(block_rate=1.76)).blocks_seconds(10**9)
        / StackCosts(shape, HARDWARE["h100"]).blocks_seconds(10**9)
        for shape in (SHAPE, ROUTED)
    ]
    assert gained[0] < gained[1]
    with pytest.raises(
        UserError, match="no rates are known for 'nvfp4' on this device; choose one of fp8, fp8-rowwise"
    ):
        narrow_rate("h100", "nvfp4")


def test_kernels_without_a_price_are_refused():
    assert attention_kernel("h200", "fa3") == hardware_preset("h200-fa3").attention
    with pytest.raises(UserError, match=re.escape("'fa4' have no price on this device; choose one of fa2, fa3, cudnn")):
        attention_kernel("h100", "fa4")
    with pytest.raises(UserError, match="only its own"):
        attention_kernel("cpu", "fa2")


def test_async_tp_hides_a_part_of_the_collectives():
    waiting, hiding = (costs_of(StackSoftware(async_tp=hidden), tp=8, dp=1) for hidden in (False, True))
    assert hiding.rank.tp_seconds(4096) == pytest.approx(0.6 * waiting.rank.tp_seconds(4096))


def test_kernels_that_are_not_fused_take_longer_outside_attention_and_head():
    fused, eager = (costs_of(StackSoftware(fused=one)).rank for one in (True, False))
    assert eager.blocks_seconds(4096, "forward") > fused.blocks_seconds(4096, "forward")
    assert eager.piece_seconds(0, 4096, "forward") == fused.piece_seconds(0, 4096, "forward")
    assert eager.head_seconds(4096, "forward") == pytest.approx(fused.head_seconds(4096, "forward"))


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=5), st.floats(0.0, 1.0))
def test_the_host_takes_as_long_for_every_micro_batch_that_has_tokens(tokens: list[int], seconds: float):
    without, waits = (costs_of(StackSoftware(micro_batch_seconds=one)).rank for one in (0.0, seconds))
    expected = np.where(np.array(tokens) > 0, seconds, 0.0)
    for price in ("blocks_seconds", "linear_seconds"):
        longer = getattr(waits, price)(tokens) - getattr(without, price)(tokens)
        np.testing.assert_allclose(longer, expected, atol=1e-9)
    assert waits.document_seconds(4096) == pytest.approx(without.document_seconds(4096))


@pytest.mark.usefixtures("kernels_launched_at_once")
def test_gathering_the_context_shows_whole_in_both_directions():
    simulated = simulated_job(
        SHAPE, WINDOW, "fixed-4d", cp=4, micro_batches=4, software=StackSoftware(gathers_context=True)
    )
    plans = [*islice(StepPlanner(simulated, documents()).plans(), 2)]
    costs = JobCosts(simulated)
    with_all = Steps.of_plans(plans, costs)
    without = replace(with_all, modelled=with_all.modelled - {"cp exchange"})
    tokens = with_all.shards.tokens
    others = tokens.sum(axis=-1, keepdims=True) - tokens
    nothing = np.zeros_like(others)
    for direction in ("forward", "backward"):
        shown = costs.rank.exchange_seconds(others, 4) + costs.rank.copy_seconds(nothing, others, nothing, direction)
        assert (shown > 0).all()
        more, less = (getattr(steps.priced.blocks, direction) for steps in (with_all, without))
        np.testing.assert_allclose(more - less, shown.max(axis=-1), rtol=1e-3)
