"""Documents with several costs: every document once, within the limits."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wlb
from tests.cases import in_turn
from tests.packing.streams import METHODS, SETTINGS, WORKLOADS
from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.packing.registry import make_packer
from wlb.workload.phases import DocumentPhases, PhasedPrices, segment_seconds

WINDOW = 64
PRICES = WORKLOADS["7b"]


@st.composite
def tasks(draw: st.DrawFn) -> dict[str, Any]:
    parts = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 50), min_size=parts, max_size=40))
    seconds = draw(st.lists(st.sampled_from([0.0, 1e-6, 2e-5, 5e-5]), min_size=len(lengths), max_size=len(lengths)))
    return {"lengths": lengths, "parts": parts, "seconds": seconds}


def phases_of(task: dict[str, Any]) -> DocumentPhases:
    return DocumentPhases({"encoder": task["seconds"]})


def corpus(documents: int = 600) -> tuple[list[int], DocumentPhases]:
    """Images and text of independent sizes, in a context window of 8192."""
    drawn = np.random.default_rng(0)
    patches = np.where(drawn.random(documents) < 0.6, drawn.lognormal(7, 1, documents).clip(100, 16_000), 0)
    lengths = (drawn.lognormal(6, 1, documents) + patches / 4).clip(20, 8192).astype(int)
    return lengths.tolist(), DocumentPhases({"encoder": 2e-5 * patches})


@SETTINGS
@given(tasks(), st.booleans())
def test_balanced_parts_hold_every_document_once_within_the_limits(task: dict[str, Any], equal_size: bool):
    lengths, parts, phases = task["lengths"], task["parts"], phases_of(task)
    equal_size = equal_size and len(lengths) % parts == 0
    limit = max(*lengths, int(1.5 * sum(lengths) / parts) + 1)
    common = {"lengths": lengths, "parts": parts, "max_tokens": limit, "equal_size": equal_size, "workload": PRICES}
    try:
        divided = wlb.balance(**common, phases=phases)
    except UserError:  # no way to keep to the limit was found
        return
    assert sorted(itertools.chain(*divided)) == list(range(len(lengths)))
    assert len(divided) == parts
    assert all(divided)
    assert all(sum(lengths[number] for number in part) <= limit for part in divided)
    assert not equal_size or len({len(part) for part in divided}) == 1


@pytest.mark.parametrize("method", METHODS)
def test_packers_train_every_document_once_and_hold_what_fits(method: str):
    @SETTINGS
    @given(tasks())
    def check(task: dict[str, Any]) -> None:
        lengths, phases = task["lengths"], phases_of(task)
        sizes: Any = {"micro_batches": task["parts"], "context_window": WINDOW}
        packer = make_packer(method, **sizes, workload=PhasedPrices(PRICES, phases))
        half = len(lengths) // 2
        plans = packer.plan(lengths[:half])
        again = make_packer(method, **sizes, workload=PhasedPrices(PRICES, phases))
        again.load_state_dict(packer.state_dict())
        rest = packer.plan(lengths[half:]) + packer.drain()
        assert rest == again.plan(lengths[half:]) + again.drain()
        plans += rest
        trained = sorted(segment for plan in plans for segment in plan.segments)
        if method != "sequential":
            assert trained == [Segment(number, 0, length) for number, length in enumerate(lengths)]
            assert max(m.tokens for plan in plans for m in plan.micro_batches) <= packer.max_tokens
        assert sum(segment.length for segment in trained) == sum(lengths)
        total = segment_seconds(PhasedPrices(PRICES, phases), trained).sum()
        assert sum(m.workload for plan in plans for m in plan.micro_batches) == pytest.approx(total)

    check()


@in_turn("method", ["variable_length", "balanced"])  # in windows of fixed length, tokens leave no choice
def test_micro_batches_are_even_in_the_sum_of_phases(method: str):
    lengths, phases = corpus()
    prices = PhasedPrices(PRICES, phases)
    imbalance = []
    for workload in (PRICES, prices):
        packer = make_packer(method, micro_batches=8, context_window=8192, workload=workload)
        sums = [
            [segment_seconds(prices, m.segments).sum() for m in plan.micro_batches] for plan in packer.plan(lengths)
        ]
        imbalance.append(np.mean([max(of_step) / np.mean(of_step) for of_step in sums]))
    assert imbalance[1] < 1.02 < 1.1 < imbalance[0]


def test_balanced_parts_are_even_in_the_sum_of_phases():
    lengths, phases = corpus(200)
    costs = segment_seconds(
        PhasedPrices(PRICES, phases), [(number, 0, length) for number, length in enumerate(lengths)]
    )
    sums = [costs[part].sum() for part in wlb.balance(lengths, 8, workload=PRICES, phases=phases)]
    assert max(sums) < 1.01 * max(costs.sum() / 8, costs.max())
    ranks = wlb.balance(lengths, ranks=4, max_tokens=20_000, workload=PRICES, phases=phases)
    totals = [sum(costs[part].sum() for part in rank) for rank in ranks]
    assert max(totals) < 1.01 * min(totals)


def test_a_document_that_is_cut_has_its_phases_once():
    phases = DocumentPhases({"encoder": [3.0, 4.0]})
    pieces = [Segment(2, 0, 10), Segment(2, 10, 10), Segment(1, 0, 7)]  # document 2 is document 0 of the next epoch
    assert phases.of(pieces).tolist() == [3.0, 0.0, 4.0]


REFUSED = [
    ({"seconds": {"encoder": [1.0, -1.0]}}, "at least 0"),
    ({"seconds": {"encoder": [[1.0]]}}, "shape"),
    ({"seconds": {"encoder": [float("nan")]}}, "at least 0"),
    ({"seconds": {"a": [1.0], "b": [1.0, 2.0]}}, "1 and 2 documents"),
]


@in_turn(("arguments", "message"), REFUSED)
def test_phases_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        DocumentPhases(**arguments)


def test_what_does_not_fit_is_refused():
    phases = DocumentPhases({"encoder": [1.0, 1.0]})
    settings: Any = {"micro_batches": 1, "context_window": 64, "workload": PhasedPrices(PRICES, phases)}
    with pytest.raises(UserError, match="phases cover 2 documents, but there are 3"):
        wlb.balance([1, 2, 3], 2, phases=phases)
    for grouping in ("level", "slices"):
        with pytest.raises(UserError, match=f"grouping = '{grouping}' does not support phases"):
            make_packer("balanced", **settings, grouping=grouping)
