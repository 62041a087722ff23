"""Our packer: steps of one global batch, even in workload.

A document is due in the step whose global batch it begins in, where the stream is cut every N x context window tokens,
by the cuts as they are when it is first looked at: one that was due but found no room brings all later cuts forward by
its length (back-pressure). What has not been looked at when the packer is drained is due in the first drained step.
"""

import hashlib
import os
import subprocess
import sys
from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.streams import SETTINGS, packer_for, streams
from wlb.documents.lengths import read_lengths
from wlb.packing.registry import make_packer
from wlb.workload import make_workload

WORKLOAD = make_workload("llama3-8b", "h100", tp=8, cp=8)
BALANCED = {"methods": ("balanced",)}
ROOMY = {"global_batch": None, "max_length_factor": 2}  # room for a global batch, and for a document more


class Run:
    """A stream fed document by document, with the end of every step's global batch by the definition above."""

    def __init__(self, stream):
        _, self.options, self.lengths = stream
        self.packer = packer_for(stream)
        self.global_batch = self.packer.global_batch_tokens
        self.starts = [0, *accumulate(self.lengths)]
        self.longest = max(self.lengths, default=1)
        self.ends = [self.global_batch]
        self.dues: list[int] = []
        self.taken: list[int] = []
        self._next_steps = self.packer._next_steps
        self.packer._next_steps = self._observed_step
        self.planned = [plan for length in self.lengths for plan in self.packer.plan([length])]
        self.dues += [len(self.planned)] * (len(self.lengths) - len(self.dues))
        self.drained = self.packer.drain()

    def _observed_step(self):
        plans = self._next_steps()
        state, step, end = self.packer.state_dict(), plans[0].step, self.ends[-1]
        self.taken.append(state["documents_seen"] - len(state["arrived"]))
        for start in self.starts[len(self.dues) : self.taken[-1]]:
            self.dues.append(step if start < end else step + 1 + (start - end) // self.global_batch)
        unfit = sum(row[2] for row in state["carried"] if self.dues[row[0]] <= step)
        self.ends.append(end + max(0, self.global_batch - unfit))
        return plans


@SETTINGS
@given(streams(**BALANCED))
def test_the_reported_delay_is_steps_since_due(stream):
    run = Run(stream)
    for plan in run.planned + run.drained:
        waits = [(max(0, plan.step - run.dues[document]), length) for document, _, length in plan.segments]
        assert plan.delay_token_steps == sum(steps * length for steps, length in waits)
        assert plan.longest_delay == max(steps for steps, _ in waits)


@SETTINGS
@given(streams(**BALANCED, **ROOMY))
def test_no_document_waits_where_there_is_room(stream):
    """With L_max of a window and the longest document: those due began in one global batch, and all fit.

    They have fewer than N x window + longest tokens. One without room would leave each micro-batch with over
    L_max - longest >= window of the others.
    """
    run = Run(stream)
    assert run.packer.max_tokens >= run.options["context_window"] + run.longest
    assert {plan.longest_delay for plan in run.planned} <= {0}


@SETTINGS
@given(streams(**BALANCED))
def test_a_document_is_passed_over_only_for_those_as_old(stream):
    run = Run(stream)
    trained = {segment.document: plan.step for plan in run.planned + run.drained for segment in plan.segments}
    for plan in run.planned:
        for document, length in enumerate(run.lengths):
            due = run.dues[document]
            if plan.step >= due and trained[document] > plan.step:
                for micro_batch in plan.micro_batches:
                    older = [s.length for s in micro_batch.segments if run.dues[s.document] <= due]
                    assert sum(older) + length > run.packer.max_tokens


@SETTINGS
@given(streams(**BALANCED))
def test_the_mean_step_is_a_global_batch(stream):
    """Never more than a document above; below it only by what found no room. The first of a step is always taken in."""
    run = Run(stream)
    trained = 0
    for plan, end, taken in zip(run.planned, run.ends, run.taken, strict=False):
        waiting = run.starts[taken] - trained
        assert run.starts[taken - 1] < end or plan.tokens == waiting == run.lengths[taken - 1]
        trained += plan.tokens
        assert trained < end + run.longest
        assert run.starts[taken] >= end  # what was due by now was taken in


@SETTINGS
@given(st.lists(st.integers(1, 64), min_size=20, max_size=200), st.integers(2, 6), st.integers(1, 4))
def test_a_step_trains_the_documents_that_begin_in_its_global_batch(lengths, global_batch, micro_batches):
    packer = make_packer(
        "balanced", micro_batches=micro_batches, context_window=64, workload=WORKLOAD, global_batch=global_batch
    )
    plans = packer.plan(lengths)
    starts = [0, *accumulate(lengths)]
    for plan in plans:
        assert (plan.delay_token_steps, plan.longest_delay) == (0, 0)
        expected = [d for d, start in enumerate(starts[:-1]) if start // (64 * global_batch) == plan.step]
        assert sorted(segment.document for segment in plan.segments) == expected


def test_steps_are_of_one_size_and_micro_batches_of_one_workload():
    lengths = read_lengths("synthetic:20000:131072:0")
    packer = make_packer("balanced", micro_batches=8, context_window=131_072, workload=WORKLOAD, global_batch=32)
    plans = packer.plan(lengths)
    tokens = np.array([plan.tokens for plan in plans])
    assert tokens.std() / tokens.mean() < 0.02
    assert np.mean([plan.imbalance for plan in plans]) < 1.001


def realistic(micro_batches, **options):
    return make_packer(
        "balanced", micro_batches=micro_batches, context_window=4096, workload=make_workload("7b"), **options
    )


def test_a_drain_takes_few_steps_and_balances_what_can_be_balanced():
    packer = realistic(4, max_length_factor=1.5)
    packer.plan([4096] * 3 + [64] * 60)
    assert [plan.tokens for plan in packer.drain()] == [4096 * 3 + 64 * 60]
    packer.plan([64] * 200)
    assert max(plan.imbalance for plan in packer.drain()) < 1.02


SCRIPT = """
import hashlib, json
from wlb.documents.lengths import read_lengths
from wlb.documents.synthetic import sample_lengths
from wlb.packing.registry import make_packer
from wlb.workload import make_workload
packer = make_packer("balanced", micro_batches=4, context_window=4096, workload=make_workload("7b"))
plans = packer.plan(sample_lengths(2000, 4096).tolist()) + packer.drain()
print(hashlib.sha256(json.dumps([plan.to_json() for plan in plans]).encode()).hexdigest())
"""


def test_plans_do_not_depend_on_the_process():
    hashes = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(hashes) == 1
    assert len(hashes.pop().strip()) == hashlib.sha256().digest_size * 2
