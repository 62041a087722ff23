"""The elastic packer trains exactly its global batch, in micro-batches of equal workload or of documents alike."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from wlb.documents.lengths import read_lengths
from wlb.errors import UserError
from wlb.packing.registry import make_packer
from wlb.workload import make_workload

WORKLOAD = make_workload("llama3-8b", "h100", tp=8, cp=8)


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.integers(1, 64), min_size=20, max_size=200), st.integers(2, 6), st.integers(1, 4))
def test_a_step_trains_the_documents_that_begin_in_its_global_batch(lengths, global_batch, micro_batches):
    packer = make_packer(
        "elastic", micro_batches=micro_batches, context_window=64, workload=WORKLOAD, global_batch=global_batch
    )
    plans = packer.plan(lengths)
    starts = [0, *accumulate(lengths)]
    for plan in plans:
        assert (plan.delay_token_steps, plan.longest_delay) == (0, 0)
        expected = [d for d, start in enumerate(starts[:-1]) if start // (64 * global_batch) == plan.step]
        assert sorted(segment.document for segment in plan.segments) == expected


def test_steps_are_of_one_size_and_micro_batches_of_one_workload():
    lengths = read_lengths("synthetic:20000:131072:0")
    packer = make_packer("elastic", micro_batches=8, context_window=131_072, workload=WORKLOAD, global_batch=32)
    plans = packer.plan(lengths)
    tokens = np.array([plan.tokens for plan in plans])
    assert tokens.std() / tokens.mean() < 0.02
    assert np.mean([plan.imbalance for plan in plans]) < 1.001


def test_a_document_dearer_than_a_micro_batch_may_wait_where_that_is_asked_for():
    lengths = read_lengths("synthetic:20000:131072:0")
    imbalance = []
    for max_delay in (0, 8):
        packer = make_packer(
            "elastic",
            micro_batches=32,
            context_window=131_072,
            workload=WORKLOAD,
            global_batch=32,
            max_delay=max_delay,
        )
        plans = packer.plan(lengths)
        imbalance.append(np.mean([plan.imbalance for plan in plans]))
        assert (sum(plan.delay_token_steps for plan in plans) > 0) == (max_delay > 0)
    assert imbalance[1] < imbalance[0]


def test_documents_alike_go_together_and_micro_batches_are_even_in_tokens():
    lengths = read_lengths("synthetic:20000:131072:0")
    packer = make_packer(
        "elastic", micro_batches=40, context_window=131_072, workload=WORKLOAD, global_batch=128, grouping="alike"
    )
    plan = packer.plan(lengths)[0]
    tokens = np.array([micro_batch.tokens for micro_batch in plan.micro_batches])
    assert tokens.max() < 1.02 * tokens.mean()
    assert plan.delay_token_steps == 0
    # Best fit fills up what long documents leave with short ones: by tokens, few are far from the others.
    spread = [
        np.average(np.abs(np.array(m.lengths) - np.median(m.lengths)), weights=m.lengths) / max(m.lengths)
        for m in plan.micro_batches
    ]
    assert np.median(spread) < 0.25


def test_alike_lets_no_document_wait_on_purpose():
    with pytest.raises(UserError, match="moves no document to another step"):
        make_packer("elastic", micro_batches=2, context_window=10, workload=WORKLOAD, grouping="alike", max_delay=3)
