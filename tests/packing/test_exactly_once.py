"""Every document is trained once, whole where promised, within the limits, however the documents arrive."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import in_turn
from tests.packing.streams import (
    METHODS,
    SETTINGS,
    WORKLOADS,
    check_plans,
    packer_for,
    packings,
    plan_all,
    streams,
    whole_documents,
)
from wlb.documents.segments import Segment, split_overlong
from wlb.errors import UserError
from wlb.packing.packer import rows_of, segments_of
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.packing.registry import make_packer

INTEGER: Any = np.int64


@SETTINGS
@given(streams())
def test_every_document_is_trained_once_within_the_limits(stream):
    method, options, lengths = stream
    packer = packer_for(stream)
    plans = packer.plan(lengths)
    for plan in plans:  # no micro-batch is idle but where a step has fewer documents than micro-batches
        assert all(m.segments for m in plan.micro_batches) or (
            method == "balanced" and len(list(plan.segments)) < len(plan.micro_batches)
        )
    plans += packer.drain()
    check_plans(plans, method, options, whole_documents(lengths))
    assert packer.pending == []
    assert packer.drain() == []


@SETTINGS
@given(packings(context_window=24), st.lists(st.integers(1, 100), max_size=12))
def test_pieces_of_overlong_documents_are_trained_once(packing, lengths):
    method, options = packing
    table, _ = split_overlong(rows_of(whole_documents(lengths)), options["context_window"])
    pieces = segments_of(table)
    check_plans(plan_all(make_packer(method, **options), pieces), method, options, pieces)


@SETTINGS
@given(packings(context_window=24), st.lists(st.tuples(st.integers(0, 2), st.sampled_from([3, 13, 24])), max_size=14))
def test_a_document_given_several_times_is_trained_as_often(packing, pairs):
    method, options = packing
    documents = [Segment(document, 0, length) for document, length in pairs]
    check_plans(plan_all(make_packer(method, **options), documents), method, options, documents)


@SETTINGS
@given(streams(), st.data())
def test_plans_do_not_depend_on_how_documents_arrive(stream, data):
    lengths = stream[2]
    packer = packer_for(stream)
    expected, rest = packer.plan(lengths), packer.drain()

    cuts = data.draw(st.lists(st.integers(0, len(lengths)), max_size=5).map(sorted))
    chunkings = [
        [[length] for length in lengths],
        [lengths[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(lengths)], strict=True)],
    ]
    forms = [lengths, list(enumerate(lengths)), whole_documents(lengths), np.array(lengths, np.int32)]
    for chunks in [*chunkings, *([form] for form in forms)]:
        other = packer_for(stream)
        assert [plan for chunk in chunks for plan in other.plan(chunk)] == expected
        assert other.drain() == rest


@SETTINGS
@given(streams())
def test_planning_goes_on_after_a_drain(stream):
    method, options, lengths = stream
    packer = packer_for(stream)
    first, second = plan_all(packer, lengths), plan_all(packer, lengths)
    again = [Segment(document + len(lengths), 0, length) for document, _, length in whole_documents(lengths)]
    check_plans(first + second, method, options, whole_documents(lengths) + again)


@pytest.mark.parametrize("method", METHODS)
@in_turn("lengths", [[], [1], [8], [8, 1], [1, 1, 1]])
def test_fewer_documents_than_micro_batches(method, lengths):
    options = {"micro_batches": 4, "context_window": 8, "workload": WORKLOADS["7b"]}
    plans = plan_all(make_packer(method, **options), lengths)
    assert len(plans) == bool(lengths)
    check_plans(plans, method, options | {"max_length_factor": 1.5}, whole_documents(lengths))


@pytest.mark.parametrize("method", METHODS)
@in_turn(
    "arrivals",
    [
        np.array([5, 3, 8]),
        [INTEGER(5), 3, np.uint8(8)],
        [(INTEGER(0), np.int32(5)), (1, INTEGER(3)), (2, 8)],
        [Segment(INTEGER(0), INTEGER(0), INTEGER(5)), 3, (2, 8)],
    ],
)
def test_numpy_integers_become_plain_ones(method, arrivals):
    packer = make_packer(method, micro_batches=INTEGER(2), context_window=INTEGER(8), workload=WORKLOADS["7b"])
    plans = packer.plan(arrivals)
    state = packer.state_dict()
    plans += packer.drain()
    assert json.loads(json.dumps(state)) == state
    assert [StepPlan.from_json(json.loads(json.dumps(plan.to_json()))) for plan in plans] == plans
    assert {segment.document for plan in plans for segment in plan.segments} == {0, 1, 2}


@pytest.mark.parametrize("method", METHODS)
@in_turn(
    ("arrivals", "message"),
    [
        ([3, 0], "document 1 has 0 tokens; at least 1"),
        ([(42, 0)], "document 42 has 0 tokens; at least 1"),
        ([(3, 5), (-1, 5)], "document -1 starts at token 0; ids and starts must be at least 0"),
        ([Segment(7, -2, 5)], "document 7 starts at token -2; ids and starts must be at least 0"),
        ([3, 2.0], "document 1 starts at 0 and has 2.0 tokens; .* whole numbers"),
        ([(7, "5")], "document 7 .* has '5' tokens; .* whole numbers"),
        ([Segment(7, 0, True)], "document 7 .* has True tokens; .* whole numbers"),
        ([None], "document 0 .* has None tokens; .* whole numbers"),
        ([(1, 2, 3)], r"arrival \(1, 2, 3\) is not a length, .* or Segment"),
    ],
)
def test_impossible_arrivals_are_refused_whole(method, arrivals, message):
    packer = make_packer(method, micro_batches=2, context_window=8, workload=WORKLOADS["7b"])
    before = packer.state_dict()
    with pytest.raises(UserError, match=message) as error:
        packer.plan(arrivals)
    assert "\n" not in str(error.value)
    assert packer.state_dict() == before


@pytest.mark.parametrize("method", [method for method in METHODS if method != "sequential"])
def test_documents_longer_than_the_context_window_are_refused(method):
    packer = make_packer(method, micro_batches=2, context_window=8, workload=WORKLOADS["7b"])
    packer.plan([8])
    before = packer.state_dict()
    with pytest.raises(UserError, match=r"document 1 has 9 tokens, over the context window of 8; .*split, truncate"):
        packer.plan([9])
    assert packer.state_dict() == before
    pieces, _ = split_overlong(rows_of([Segment(1, 0, 9)]), packer.context_window)
    plans = packer.plan(pieces) + packer.drain()
    assert max(segment.length for plan in plans for segment in plan.segments) <= 8


def test_sequential_packing_cuts_documents_of_any_length():
    packer = make_packer("sequential", micro_batches=2, context_window=8, workload=WORKLOADS["7b"])
    options = {"micro_batches": 2, "context_window": 8, "workload": WORKLOADS["7b"]}
    check_plans(plan_all(packer, [100, 3, 29]), "sequential", options, whole_documents([100, 3, 29]))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("random", {}, "'random' is unknown; choose from sequential, fixed_greedy"),
        (
            "sequential",
            {"window": 2},
            "^window = 2: has no effect with method 'sequential', only with fixed_greedy; leave it out",
        ),
        ("sequential", {"queues": 1}, "has no option queues = 1; choose from micro_batch_windows"),
        (
            "balanced",
            {"pool_batches": 1},
            r"'balanced' has no option pool_batches = 1; did you mean rank_micro_batches\?",
        ),
        (
            "balanced",
            {"max_delay": 8},
            "^max_delay = 8: has no effect with method 'balanced', only with fixed_greedy, ",
        ),
        ("fixed_greedy", {"queues": 1}, "has no option queues = 1; choose from max_delay, window"),
        ("variable_length", {"outlier_thresholds": 8}, "^outlier_thresholds = 8: .*a list"),
        ("fixed_greedy", {"window": 0}, "^window = 0: .*greater than or equal to 1"),
        ("variable_length", {"max_delay": 0}, "^max_delay = 0: .*greater than or equal to 1"),
        ("variable_length", {"max_length_factor": 0.9}, "max_length_factor = 0.9 leaves no room for a document"),
        ("variable_length", {"max_length_factor": float("nan")}, "^max_length_factor = nan: .* finite"),
        ("variable_length", {"outlier_thresholds": (9, 3)}, r"^outlier_thresholds = \(9, 3\): .*thresholds must rise"),
        ("variable_length", {"outlier_thresholds": (0,)}, r"^outlier_thresholds = 0: .*greater than or equal to 1"),
        ("variable_length", {"max_length_factor": "auto"}, "^max_length_factor = 'auto' needs the memory"),
        ("balanced", {"micro_batches": 2.5}, "^micro_batches = 2.5 is not a whole number"),
        ("variable_length", {"micro_batches": 0}, "^micro_batches = 0 is not"),
    ],
)
def test_impossible_settings_are_refused(method, options, message):
    settings = {"micro_batches": 2, "context_window": 8, "workload": WORKLOADS["7b"]} | options
    with pytest.raises(UserError, match=message) as error:
        make_packer(method, **settings)
    assert "\n" not in str(error.value)


def test_imbalance_is_the_largest_over_the_mean_workload():
    def step(*workloads):
        return StepPlan(0, (tuple(MicroBatch((), workload) for workload in workloads),))

    assert step(1.0, 2.0, 3.0).imbalance == 1.5
    assert step(1.0, 0.0).imbalance == 2.0
    assert step(0.0, 0.0).imbalance == 1.0
