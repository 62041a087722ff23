"""What the breakdown varies is what it says."""

from __future__ import annotations

import numpy as np
import pytest

from wlb.schedules.layout import Layout
from wlb.simulate.job import NamedJob
from wlb_studies.experiment import Settings
from wlb_studies.paper.bench import Bench, Documents
from wlb_studies.paper.breakdown import LEFT_OUT, ONE_BY_ONE, WAITING

WINDOW = 8192
BENCH = Bench(NamedJob("7b", WINDOW, Layout(tp=8, cp=2, pp=2)), Documents(np.array([2 * WINDOW]), ""), 1, Settings())
WAITS = WAITING.job(BENCH)


def test_prices_are_chosen_whatever_the_packer_takes():
    assert WAITS.packing_prices != WAITS.workload
    assert WAITING._replace(prices="W_a + W_l").job(BENCH).packing_prices == WAITS.workload
    queues = WAITING._replace(changed=WAITING.changed | {"packing": {"method": "variable_length"}})
    assert queues.job(BENCH).packing_prices == WAITS.workload
    assert queues._replace(prices="balanced's").job(BENCH).packing_prices == WAITS.packing_prices


@pytest.mark.parametrize("name", [*LEFT_OUT][1:])
def test_one_thing_is_left_out(name: str):
    """A setting of packing, or sharding, or the prices; never two of them."""
    varied = LEFT_OUT[name].job(BENCH)
    if varied.packing.method != WAITS.packing.method:
        differences = ["method"]
    else:
        differences = [key for key, value in varied.packing if getattr(WAITS.packing, key) != value]
    differences += ["sharding"] if varied.sharding != WAITS.sharding else []
    differences += ["prices"] if varied.packing_prices == WAITS.workload else []
    assert len(differences) == 1


def test_one_by_one_ends_at_the_whole():
    assert [*ONE_BY_ONE.values()][-2] == LEFT_OUT["nothing"]
    last = [variant for name, variant in ONE_BY_ONE.items() if name.startswith("+")][:-1]
    assert all(variant.preset == "balanced" and variant.prices == "W_a + W_l" for variant in last)
