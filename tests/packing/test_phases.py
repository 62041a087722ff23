"""Documents with several costs: every document once, within the limits, and never worse than without phases."""

from __future__ import annotations

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
from wlb.packing import make_packer
from wlb.packing.phases import level_phases, phase_imbalance, slowest_sum
from wlb.workload.hardware import hardware_preset
from wlb.workload.phases import DocumentPhases, PhasedPrices, encoder_seconds, segment_seconds

WINDOW = 64
WITH_PHASES = [name for name in METHODS if name != "elastic"]
QUICK = [name for name in WITH_PHASES if name != "fixed_solver"]
PRICES = WORKLOADS["7b"]


@st.composite
def tasks(draw: st.DrawFn) -> dict[str, Any]:
    parts = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 50), min_size=parts, max_size=40))
    seconds = draw(st.lists(st.sampled_from([0.0, 1e-6, 2e-5, 5e-5]), min_size=len(lengths), max_size=len(lengths)))
    return {"lengths": lengths, "parts": parts, "seconds": seconds, "memory": draw(st.sampled_from([None, 1e5, 2.5e5]))}


def phases_of(task: dict[str, Any], **settings: Any) -> DocumentPhases:
    memory = None if task["memory"] is None else task["memory"] * np.array(task["seconds"])
    return DocumentPhases({"encoder": task["seconds"]}, memory, **settings)


def corpus(documents: int = 600) -> tuple[list[int], DocumentPhases]:
    """Images and text of independent sizes, in a context window of 8192."""
    drawn = np.random.default_rng(0)
    patches = np.where(drawn.random(documents) < 0.6, drawn.lognormal(7, 1, documents).clip(100, 16_000), 0)
    lengths = (drawn.lognormal(6, 1, documents) + patches / 4).clip(20, 8192).astype(int)
    return lengths.tolist(), DocumentPhases({"encoder": 2e-5 * patches})


@SETTINGS
@given(tasks(), st.booleans())
def test_balanced_parts_hold_every_document_once_within_the_limits_and_are_never_worse(
    task: dict[str, Any], equal_size: bool
):
    lengths, parts, phases = task["lengths"], task["parts"], phases_of(task)
    equal_size = equal_size and len(lengths) % parts == 0
    documents = [(number, 0, length) for number, length in enumerate(lengths)]
    held = phases.held_tokens(documents)
    limit = max(int(held.max()), int(1.5 * held.sum() / parts) + 1)
    common = {"lengths": lengths, "parts": parts, "max_tokens": limit, "equal_size": equal_size, "workload": PRICES}
    try:
        divided = wlb.balance(**common, phases=phases)
    except UserError:  # no way to keep to the limit was found
        return
    assert sorted(itertools.chain(*divided)) == list(range(len(lengths)))
    assert len(divided) == parts
    assert all(divided)
    assert all(held[part].sum() <= limit for part in divided)
    assert not equal_size or len({len(part) for part in divided}) == 1
    if task["memory"] is None:
        costs = PhasedPrices(PRICES, phases).costs(documents)
        alone = [np.array(part) for part in wlb.balance(**common)]
        # The same parts, summed in another order, may differ in the last digits.
        assert slowest_sum([np.array(part) for part in divided], costs) <= slowest_sum(alone, costs) * (1 + 1e-12)


@SETTINGS
@given(tasks())
def test_levelling_only_ever_lowers_the_sum_of_the_slowest(task: dict[str, Any]):
    costs = np.column_stack([np.square(task["lengths"]) * 1e-7, task["seconds"], np.zeros(len(task["lengths"]))])
    tokens = np.array(task["lengths"], np.int64)
    parts = np.array_split(np.arange(len(tokens)), task["parts"])
    limit = int(max(tokens[part].sum() for part in parts))
    levelled = level_phases(parts, costs, tokens, limit)
    assert sorted(np.concatenate(levelled).tolist()) == list(range(len(tokens)))
    assert all(len(part) and tokens[part].sum() <= limit for part in levelled)
    assert slowest_sum(levelled, costs) <= slowest_sum(parts, costs)


@pytest.mark.parametrize("method", QUICK)
def test_packers_train_every_document_once_and_hold_what_fits(method: str):
    @SETTINGS
    @given(tasks(), st.booleans())
    def check(task: dict[str, Any], synchronised: bool) -> None:
        lengths, phases = task["lengths"], phases_of(task, synchronised=synchronised)
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
            held = [phases.held_tokens(m.segments).sum() for plan in plans for m in plan.micro_batches]
            assert max(held) <= packer.capacity
        assert sum(segment.length for segment in trained) == sum(lengths)
        total = segment_seconds(PhasedPrices(PRICES, phases), trained).sum()
        assert sum(m.workload for plan in plans for m in plan.micro_batches) == pytest.approx(total)

    check()


@in_turn("method", WITH_PHASES)
def test_without_further_phases_plans_are_what_they_were(method: str):
    def plans(workload: Any) -> list[Any]:
        packer = make_packer(method, micro_batches=2, context_window=64, workload=workload)
        return [plan.to_json() for plan in packer.plan([50, 3, 20, 33, 7, 41, 12, 60, 5, 28, 9, 17]) + packer.drain()]

    assert plans(PhasedPrices(PRICES, DocumentPhases({}))) == plans(PRICES)


def lock_step(plans: Any, prices: PhasedPrices) -> float:
    costs = [np.array([prices.costs(m.segments).sum(axis=0) for m in plan.micro_batches]) for plan in plans]
    return float(sum(of_step.max(axis=0).sum() for of_step in costs))


@in_turn("method", [name for name in QUICK if name != "sequential"])
def test_micro_batches_are_even_in_every_phase(method: str):
    lengths, phases = corpus()
    prices = PhasedPrices(PRICES, phases)
    sizes: Any = {"micro_batches": 8, "context_window": 8192}
    workloads = {"lengths": PRICES, "sum": PhasedPrices(PRICES, DocumentPhases(phases.seconds, synchronised=False))}
    plans = {}
    for name, workload in (workloads | {"phases": prices}).items():
        packer = make_packer(method, **sizes, workload=workload)
        plans[name] = packer.plan(lengths) + packer.drain()
    taken = {name: lock_step(of_way, prices) for name, of_way in plans.items()}
    assert taken["phases"] < 0.97 * taken["lengths"]
    assert taken["phases"] < 0.97 * taken["sum"]
    degree = {name: phase_imbalance(of_way[:-2], prices)["encoder"] for name, of_way in plans.items()}
    assert degree["phases"] < degree["lengths"]


def test_levelled_parts_come_close_to_the_least_there_can_be():
    lengths, phases = corpus(200)
    documents = [(number, 0, length) for number, length in enumerate(lengths)]
    costs = PhasedPrices(PRICES, phases).costs(documents)
    parts = wlb.balance(lengths, 8, workload=PRICES, phases=phases)
    least = np.maximum(costs.sum(axis=0) / 8, costs.max(axis=0)).sum()
    assert slowest_sum([np.array(part) for part in parts], costs) < 1.01 * least
    unsynchronised = wlb.balance(lengths, 8, workload=PRICES, phases=DocumentPhases(phases.seconds, synchronised=False))
    sums = np.array([[costs[part].sum() for part in way] for way in (parts, unsynchronised)])
    assert sums[1].max() < sums[0].max()


def test_ranks_that_wait_for_each_other_are_even_in_every_slot():
    lengths, phases = corpus(200)
    documents = [(number, 0, length) for number, length in enumerate(lengths)]
    costs = PhasedPrices(PRICES, phases).costs(documents)
    taken = []
    for given_phases in (None, phases):
        ranks = wlb.balance(lengths, ranks=4, max_tokens=20_000, workload=PRICES, phases=given_phases)
        assert sorted(itertools.chain(*itertools.chain(*ranks))) == list(range(200))
        assert all(sum(lengths[number] for number in part) <= 20_000 for rank in ranks for part in rank)
        taken.append(sum(slowest_sum([np.array(part) for part in slot], costs) for slot in zip(*ranks, strict=True)))
    assert taken[1] < 0.95 * taken[0]
    assert taken[1] < 1.03 * costs.sum() / 4


def test_a_document_that_is_cut_has_its_phases_once():
    phases = DocumentPhases({"encoder": [3.0, 4.0]}, memory_tokens=[5, 6])
    pieces = [Segment(2, 0, 10), Segment(2, 10, 10), Segment(1, 0, 7)]  # document 2 is document 0 of the next epoch
    assert phases.of(pieces).tolist() == [[3.0], [0.0], [4.0]]
    assert phases.held_tokens(pieces).tolist() == [15, 10, 13]
    taken = phases.taken(pieces)
    assert taken.of([(number, 0, 1) for number in range(3)]).tolist() == phases.of(pieces).tolist()


def test_an_encoder_takes_six_flops_a_parameter_and_token():
    hardware = hardware_preset("h100")
    rate = hardware.peak_flops * hardware.gemm_efficiency
    assert encoder_seconds([0, 100], 675e6, hardware, tp=2) == pytest.approx([0, 6 * 675e6 * 100 / rate / 2])


REFUSED = [
    ({"seconds": {"encoder": [1.0, -1.0]}}, "at least 0"),
    ({"seconds": {"encoder": [[1.0]]}}, "shape"),
    ({"seconds": {"encoder": [float("nan")]}}, "at least 0"),
    ({"seconds": {"a": [1.0], "b": [1.0, 2.0]}}, "1 and 2 documents"),
    ({"seconds": {"a": [1.0]}, "memory_tokens": [1, 2]}, "1 and 2 documents"),
    ({"seconds": {"language model": [1.0]}}, "come from lengths"),
]


@in_turn(("arguments", "message"), REFUSED)
def test_phases_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        DocumentPhases(**arguments)


def test_what_does_not_fit_is_refused():
    phases = DocumentPhases({"encoder": [1.0, 1.0]}, memory_tokens=[0, 100])
    packer = make_packer("makespan", micro_batches=1, context_window=64, workload=PhasedPrices(PRICES, phases))
    with pytest.raises(UserError, match="document 1 has 60 tokens and memory_tokens = 100, together over the 96"):
        packer.plan([60, 60])
    with pytest.raises(UserError, match="phases are of 2 documents, and there are 3"):
        wlb.balance([1, 2, 3], 2, phases=phases)
    with pytest.raises(UserError, match="'elastic' does not know phases"):
        make_packer(
            "elastic", micro_batches=1, context_window=64, workload=PhasedPrices(PRICES, phases), max_length_factor=2.0
        )
