"""Steps hold every document once, and planning goes on from any step as if it had never stopped."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.config import DataConfig, PackingConfig
from wlb.packing import packer_from_config
from wlb.training.document_order import DocumentStream
from wlb.training.planner import PlannedStep, StepPlanner
from wlb.workload import make_workload

WINDOW = 32
WORKLOAD = make_workload("tiny", "h100")
METHODS = ("sequential", "fixed_greedy", "variable_length")


def planner_of(lengths: list[int], method: str, *, one_epoch: bool, dp: int = 1, **packing: Any) -> StepPlanner:
    data = DataConfig.model_validate({"store": "unused", "context_window": WINDOW, "seed": 4})
    config = PackingConfig.model_validate(
        {"method": method, "micro_batches": 4, "outlier_thresholds": [8, 16], **packing}
    )
    return StepPlanner(
        DocumentStream(np.array(lengths, dtype=np.int64), data),
        packer_from_config(config, WINDOW, WORKLOAD),
        config,
        dp,
        one_epoch=one_epoch,
    )


def tokens_of(steps: list[PlannedStep]) -> Counter[tuple[int, int]]:
    return Counter(
        (document, start + offset)
        for step in steps
        for document, start, length in step.plan.segments
        for offset in range(length)
    )


many_lengths = st.lists(st.integers(1, 50), min_size=1, max_size=150)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=15, deadline=None)
@given(lengths=many_lengths)
def test_one_epoch_trains_every_token_once(method, lengths):
    steps = list(planner_of(lengths, method, one_epoch=True))
    assert tokens_of(steps) == Counter((i, t) for i, n in enumerate(lengths) for t in range(n))
    assert [step.plan.step for step in steps] == list(range(len(steps)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("one_epoch", [True, False])
@settings(max_examples=15, deadline=None)
@given(lengths=many_lengths, stop=st.integers(0, 6), window=st.integers(1, 3))
def test_resumes_after_any_step(method, one_epoch, lengths, stop, window):
    straight = planner_of(lengths, method, one_epoch=one_epoch, window=window)
    before = list(islice(straight, stop))
    after = list(islice(straight, 8))
    resumed = planner_of(lengths, method, one_epoch=one_epoch, window=window)
    if before:
        resumed.load_state_dict(json.loads(json.dumps(before[-1].state)))
    again = list(islice(resumed, 8 if before else stop + 8))
    assert [s.plan for s in again] == [s.plan for s in (after if before else before + after)]
    assert [s.state for s in again] == [s.state for s in (after if before else before + after)]


def test_a_resumed_plan_may_be_dealt_to_other_ranks():
    lengths = [n % 30 + 1 for n in range(300)]
    straight = planner_of(lengths, "fixed_greedy", one_epoch=True, window=2)
    first = next(straight)
    resumed = planner_of(lengths, "fixed_greedy", one_epoch=True, window=2, dp=2)
    resumed.load_state_dict(first.state)
    expected, actual = next(straight).plan, next(resumed).plan
    assert len(actual.ranks) == 2
    assert sorted(actual.segments) == sorted(expected.segments)


def test_the_next_epoch_follows_without_draining():
    lengths = [5] * 100  # 500 tokens: not a whole number of steps of 128
    steps = list(islice(planner_of(lengths, "sequential", one_epoch=False), 20))
    assert {step.plan.tokens for step in steps} == {4 * WINDOW}
    trained = tokens_of(steps)
    assert set(trained.values()) == {1}
    assert {(document, token) for document in range(500) for token in range(5)} <= trained.keys()


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=10, deadline=None)
@given(lengths=many_lengths, taken=st.integers(0, 6))
def test_pending_documents_are_those_taken_in_and_not_finished(method, lengths, taken):
    planner = planner_of(lengths, method, one_epoch=True)
    steps = list(islice(planner, taken))
    cursor = planner.state_dict()["stream"]["cursor"]
    planned = Counter(document for document, _ in tokens_of(steps))
    finished = sum(planned[document] == length for document, length in enumerate(lengths))
    if steps:
        assert steps[-1].pending_documents == planner.pending_documents == cursor - finished
    copy = planner_of(lengths, method, one_epoch=True)
    copy.load_state_dict(json.loads(json.dumps(planner.state_dict())))
    assert copy.pending_documents == planner.pending_documents
