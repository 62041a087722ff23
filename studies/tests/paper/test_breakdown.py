"""What the breakdown varies is what it says."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from wlb.schedules.layout import Layout
from wlb.simulate.job import NamedJob
from wlb_studies.experiment import Settings
from wlb_studies.paper.bench import Bench, Documents
from wlb_studies.paper.breakdown import ONE_BY_ONE

WINDOW = 8192
BENCH = Bench(NamedJob("7b", WINDOW, Layout(tp=8, cp=2, pp=2)), Documents(np.array([2 * WINDOW]), ""), 1, Settings())


def test_one_thing_is_added_at_a_time_to_wlb_llm():
    names = ["WLB-LLM", *(name for name in ONE_BY_ONE if name.startswith("+"))]
    jobs = [BENCH.job(preset, **changed) for preset, changed in map(ONE_BY_ONE.__getitem__, names)]
    added = []
    for before, after in pairwise(jobs):
        added.append([key for key, value in after.packing if getattr(before.packing, key) != value])
        added[-1] += ["sharding"] if before.sharding != after.sharding else []
    assert added == [["assignment"], ["order"], ["sharding"]]
