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
from wlb.documents.order import DocumentStream, shuffled
from wlb.packing.plan import StepPlan
from wlb.planning.job import JobSpec
from wlb.planning.planner import PlannedStep, StepPlanner
from wlb.workload import hardware_preset, model_shape

WINDOW = 32
METHODS = ("sequential", "fixed_greedy", "variable_length")


def planner_of(
    lengths: list[int],
    method: str,
    *,
    one_epoch: bool,
    dp: int = 1,
    window_tokens: int = WINDOW,
    overlong: str = "split",
    **packing: Any,
) -> StepPlanner:
    data = DataConfig.model_validate(
        {"store": "unused", "context_window": window_tokens, "seed": 4, "overlong": overlong}
    )
    config = PackingConfig.model_validate(
        {"method": method, "micro_batches": 4, "outlier_thresholds": [8, 16], **packing}
    )
    job = JobSpec(model_shape("tiny"), hardware_preset("h100"), config, data=data, dp=dp, pp=2)
    return StepPlanner(job, np.array(lengths, dtype=np.int64), epochs=1 if one_epoch else None)


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
    assert [s.documents for s in again] == [s.documents for s in (after if before else before + after)]


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


@pytest.mark.parametrize("method", [*METHODS, "makespan"])
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=80), overlong=st.sampled_from(["split", "truncate"]))
def test_a_document_is_finished_when_all_of_its_pieces_are_trained(method, lengths, overlong):
    """Packers hold long pieces back while they train the short one at the document's end."""
    planner = planner_of(lengths, method, one_epoch=True, overlong=overlong)
    left = [min(length, WINDOW) if overlong == "truncate" else length for length in lengths]
    for step in planner:
        for document, _, length in step.plan.segments:
            left[document] -= length
        trained = {segment.document for segment in step.plan.segments}
        assert step.documents == tuple(sorted(document for document in trained if not left[document]))
        assert step.pending_documents == step.state["stream"]["cursor"] - left.count(0)


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


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25, deadline=None)
@given(
    lengths=many_lengths,
    window=st.integers(1, 3),
    chain=st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2]), st.integers(0, 3)), max_size=5),
)
def test_a_chain_of_resumes_with_other_micro_batches_trains_every_token_once(method, lengths, window, chain):
    steps: list[PlannedStep] = []
    planner = planner_of(lengths, method, one_epoch=True, window=window)
    for per_rank, dp, count in chain:
        steps += islice(planner, count)
        state = json.loads(json.dumps(planner.state_dict()))
        packing = {"micro_batches": per_rank * dp, "window": window}
        planner = planner_of(lengths, method, one_epoch=True, dp=dp, **packing)
        planner.load_state_dict(state)
        for step in islice(planner, 1):
            assert [len(rank) for rank in step.plan.ranks] == [per_rank] * dp
            steps.append(step)
    steps += planner
    assert tokens_of(steps) == Counter((i, t) for i, n in enumerate(lengths) for t in range(n))
    assert [step.plan.step for step in steps] == list(range(len(steps)))


@settings(max_examples=40, deadline=None)
@given(
    lengths=many_lengths,
    chain=st.lists(
        st.tuples(st.sampled_from(METHODS), st.integers(1, 6), st.integers(8, 40), st.integers(0, 3)), max_size=4
    ),
)
def test_a_chain_of_other_methods_and_windows_trains_every_token_once(lengths, chain):
    steps: list[PlannedStep] = []
    planner = planner_of(lengths, "variable_length", one_epoch=True)
    for method, micro_batches, window_tokens, count in chain:
        steps += islice(planner, count)
        state = json.loads(json.dumps(planner.state_dict()))
        planner = planner_of(
            lengths, method, one_epoch=True, window_tokens=window_tokens, micro_batches=micro_batches, window=2
        )
        planner.load_state_dict(state, packed_otherwise=True)
        for step in islice(planner, 1):
            assert max(segment.length for segment in step.plan.segments) <= window_tokens
            steps.append(step)
    steps += planner
    assert tokens_of(steps) == Counter((i, t) for i, n in enumerate(lengths) for t in range(n))
    assert [step.plan.step for step in steps] == list(range(len(steps)))


def test_steps_not_handed_out_come_first_when_packed_again():
    lengths = [n % 30 + 1 for n in range(300)]
    straight = planner_of(lengths, "fixed_greedy", one_epoch=True, window=3)
    next(straight)
    state = json.loads(json.dumps(straight.state_dict()))
    packed = {
        segment
        for plan in state["emitted"]
        for rank in plan["ranks"]
        for m in rank
        for segment in map(tuple, m["segments"])
    }
    assert len(state["emitted"]) > 1
    smaller = planner_of(lengths, "fixed_greedy", one_epoch=True, window=1, micro_batches=2)
    smaller.load_state_dict(state)
    again = [step.plan for step in islice(smaller, 3)]
    assert [plan.step for plan in again] == [1, 2, 3]
    taken = [segment for plan in again for segment in plan.segments]
    waiting = {tuple(row[:3]) for row in state["packer"]["carried"]}
    assert set(taken) <= packed | waiting


def test_steps_over_a_smaller_l_max_are_packed_again():
    lengths = [20] * 100
    large = planner_of(lengths, "variable_length", one_epoch=True, max_length_factor=2.0, outlier_thresholds=[])
    steps = [next(large)]
    emitted = [StepPlan.from_json(plan) for plan in steps[0].state["emitted"]]
    assert max(m.tokens for plan in emitted for m in plan.micro_batches) > WINDOW
    small = planner_of(lengths, "variable_length", one_epoch=True, max_length_factor=1.0, outlier_thresholds=[])
    small.load_state_dict(steps[0].state)
    rest = list(small)
    assert max(m.tokens for step in rest for m in step.plan.micro_batches) <= WINDOW
    assert tokens_of(steps + rest) == Counter((i, t) for i, n in enumerate(lengths) for t in range(n))


@pytest.mark.parametrize("method", METHODS)
def test_resuming_takes_in_only_what_the_next_step_needs(method, monkeypatch):
    lengths = [16] * 5000
    planner = planner_of(lengths, method, one_epoch=False)
    state = planner.state_dict()
    state["stream"] |= {"epoch": 10_000, "cursor": 4000}
    state["packer"] |= {"step": 10_000_000}
    taken: list[int] = []
    take = DocumentStream.take

    def counting(stream: DocumentStream, documents: int) -> Any:
        taken.append(documents)
        return take(stream, documents)

    monkeypatch.setattr(DocumentStream, "take", counting)
    planner.load_state_dict(json.loads(json.dumps(state)))
    assert taken == []
    step = next(planner)
    assert sum(taken) == 64
    assert step.plan.step == 10_000_000
    order = shuffled(5000, 4, 10_000)[4000:4064]
    assert {segment.document for segment in step.plan.segments} <= {10_000 * 5000 + i for i in order.tolist()}
