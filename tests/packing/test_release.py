"""The search for the outliers of a step, against all subsets, and its fluid against real packings."""

from itertools import product

import numpy as np
import pytest

from tests.packing.streams import WORKLOADS
from wlb.documents.segments import Segment
from wlb.documents.synthetic import sample_lengths
from wlb.packing import balanced
from wlb.packing.packer import Pending
from wlb.packing.registry import make_packer
from wlb.packing.release import Fluid, Offer, Outlier, StepRules, _appraise, choose
from wlb.workload import make_workload

WINDOW = 1024


def outlier(length, due, overdue, workload=WORKLOADS["polynomial"]):
    seconds = float(workload.document_seconds([length])[0])
    return Outlier(Pending(length, seconds, 0, Segment(0, 0, length), length), due, due and overdue)


def fluid(tokens, workload=WORKLOADS["polynomial"]):
    """``tokens`` in documents of 16 tokens."""
    return Fluid(tokens, tokens / 16 * float(workload.document_seconds([16])[0]), tokens // 16)


def best_of_all(offer):
    sides = [(True,) if o.overdue else (True, False) for o in offer.outliers]
    return min(_appraise(released, offer).price for released in product(*sides))


def test_the_search_comes_close_to_the_best_of_all_subsets():
    """On steps drawn as they come, by its own price: the best itself in nine of ten."""
    random = np.random.default_rng(0)
    gaps = []
    for _ in range(150):
        lengths = random.integers(WINDOW // 8, WINDOW, random.integers(1, 9), endpoint=True).tolist()
        outliers = [outlier(length, bool(random.random() < 0.7), bool(random.random() < 0.1)) for length in lengths]
        due = max(0, 4 * WINDOW - sum(o.item.length for o in outliers if o.due)) // 16 * 16
        delay_price = float(random.choice([0.02, 0.1, 0.3]))
        offer = Offer(
            outliers=sorted(outliers, key=lambda o: (-o.item.seconds, o.due)),
            due=fluid(due),
            early=fluid(WINDOW),
            aim=4 * WINDOW,
            rules=StepRules(4, 3 * WINDOW // 2, WINDOW, 7 * WINDOW, 4 * WINDOW, delay_price, fluid_may_wait=True),
        )
        gaps.append(choose(offer).price - best_of_all(offer))
    assert min(gaps) > -1e-12
    assert np.mean(np.array(gaps) < 1e-9) > 0.9
    assert np.mean(gaps) < 0.002
    assert max(gaps) < 0.05


@pytest.mark.parametrize("factor", [1.25, 1.5, 2.0])
def test_the_fluid_tells_how_even_the_step_will_be(factor, monkeypatch):
    choices = []

    def observed(offer):
        choices.append(choose(offer))
        return choices[-1]

    monkeypatch.setattr(balanced, "choose", observed)
    window = 65536
    settings = {"context_window": window, "workload": make_workload("7b"), "max_length_factor": factor}
    packer = make_packer("balanced", micro_batches=4, max_delay=8, **settings)
    plans = packer.plan(sample_lengths(15_000, window).tolist())
    assert len(plans) > 60
    errors = [abs(plan.imbalance / choice.imbalance - 1) for plan, choice in zip(plans, choices, strict=True)]
    assert np.mean(errors) < 0.002
    assert max(errors) < 0.03


def test_of_equal_outliers_those_not_due_wait():
    """80 due documents of 2/5 window in 32 micro-batches, three in some: 16 of the early ones make it three in all."""
    settings = {"context_window": 1000, "workload": WORKLOADS["7b"], "max_length_factor": 1.5}
    packer = make_packer("balanced", micro_batches=32, lookahead=0.5, **settings)
    plans = packer.plan([400] * 4000)
    assert {plan.longest_delay for plan in plans} == {0}
    assert max(plan.imbalance for plan in plans[:-1]) == pytest.approx(1)
