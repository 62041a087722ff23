"""How long documents wait: reported as it is, bounded, and with a bounded backlog.

The bounds follow from the rules. Documents have at most ``longest`` tokens; a round plans ``window`` x N micro-batches.

- A round takes documents in until it holds ``window`` global batches, so never ``longest`` tokens more, and K queues
  keep fewer than N documents each: the backlog is under ``window`` N W + longest + K (N - 1) longest tokens.
- A document that has waited ``max_delay`` rounds is passed over only if, in every micro-batch, older documents
  leave it too little room. That takes N (L_max - longest + 1) tokens of the backlog each step.
- Where L_max is at least W + longest, the documents of one round's arrival all fit a round: nothing waits longer.
"""

from itertools import product

import pytest
from hypothesis import given

from tests.cases import in_turn
from tests.packing.streams import ADVERSARIAL, POOLING, SETTINGS, WORKLOADS, packer_for, streams
from wlb.packing.plan import StepPlan
from wlb.packing.registry import make_packer


def fed_one_by_one(packer, options, lengths):
    """The steps planned, those drained, and the step in which each document arrived."""
    window, global_batch = options.get("window", 1), options["micro_batches"] * options["context_window"]
    arrived: list[int] = []
    planned: list[StepPlan] = []
    held = 0  # tokens in the pool of the round to come
    for length in lengths:
        arrived.append(len(planned) + min(held // global_batch, window - 1))
        held += length
        steps = packer.plan([length])
        if steps:
            planned += steps
            held = sum(row[2] for row in packer.state_dict()["carried"])
    waiting = packer.state_dict()["arrived"]
    for document, *_ in waiting:
        arrived[document] = len(planned)
    return planned, packer.drain(), arrived


@SETTINGS
@given(streams(methods=POOLING))
def test_the_reported_delay_is_steps_since_arrival(stream):
    _, options, lengths = stream
    planned, drained, arrived = fed_one_by_one(packer_for(stream), options, lengths)
    for plan in planned + drained:
        waits = [(max(0, plan.step - arrived[document]), length) for document, _, length in plan.segments]
        assert plan.delay_token_steps == sum(steps * length for steps, length in waits)
        assert plan.longest_delay == max(steps for steps, _ in waits)


def test_sequential_packing_delays_nothing():
    packer = make_packer("sequential", micro_batches=2, context_window=8, workload=WORKLOADS["7b"])
    assert {plan.longest_delay for plan in packer.plan([5, 9, 40] * 20) + packer.drain()} == {0}


@SETTINGS
@given(streams(methods=("fixed_greedy", "variable_length")))
def test_an_overdue_document_goes_before_every_younger_one(stream):
    _, options, lengths = stream
    packer = packer_for(stream)
    planned, drained, arrived = fed_one_by_one(packer, options, lengths)
    window = options.get("window", 1)
    trained = {segment.document: plan.step for plan in planned + drained for segment in plan.segments}
    for first in range(0, len(planned), window):
        micro_batches = [m for plan in planned[first : first + window] for m in plan.micro_batches]
        for document, length in enumerate(lengths):
            overdue = first - arrived[document] >= options["max_delay"] * window
            if overdue and trained[document] >= first + window:
                for micro_batch in micro_batches:
                    older = [s.length for s in micro_batch.segments if arrived[s.document] <= arrived[document]]
                    assert sum(older) + length > packer.max_tokens


@SETTINGS
@given(streams(methods=POOLING))
def test_delay_and_backlog_are_bounded(stream):
    _, options, lengths = stream
    packer = packer_for(stream)
    micro_batches, window = options["micro_batches"], options.get("window", 1)
    longest = max(lengths, default=1)
    queues = getattr(packer, "outlier_thresholds", ())
    backlog = window * micro_batches * options["context_window"] + longest
    backlog += max(2, len(queues)) * (micro_batches - 1) * longest if "outlier_thresholds" in options else 0
    passed_over = backlog // (window * micro_batches * (packer.max_tokens - longest + 1))
    if window == 1 and packer.max_tokens >= options["context_window"] + longest:
        passed_over = 0
    planned = []
    for length in lengths:
        planned += packer.plan([length])
        assert sum(segment.length for segment in packer.pending) < backlog
    rounds = options["max_delay"] + passed_over
    for plan in planned:
        assert plan.longest_delay <= rounds * window + 2 * (window - 1)
    drained = packer.drain()
    for plan in drained:
        assert plan.longest_delay <= rounds * window + 2 * (window - 1) + len(drained)


@pytest.mark.parametrize("shape", ADVERSARIAL)
@in_turn(("factor", "micro_batches"), [*product([1.0, 1.5, 2.0], [1, 4])])
def test_adversarial_streams_settle(shape, factor, micro_batches):
    """What waits stays under what a queue lets wait; and nothing waits for longer than that."""
    window, max_delay = 48, 4
    settings = {"micro_batches": micro_batches, "context_window": window, "workload": WORKLOADS["polynomial"]}
    packer = make_packer("variable_length", **settings, max_length_factor=factor, max_delay=max_delay)
    pattern = ADVERSARIAL[shape](window)
    backlog = micro_batches * window + max(pattern) + 2 * (micro_batches - 1) * max(pattern)
    plans = []
    for _ in range(1500 // len(pattern)):
        plans += packer.plan(pattern)
        assert sum(segment.length for segment in packer.pending) < backlog
    assert all(micro_batch.segments for plan in plans for micro_batch in plan.micro_batches)
    assert max(plan.longest_delay for plan in plans) <= max_delay
