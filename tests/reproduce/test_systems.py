"""The systems that experiments run."""

from __future__ import annotations

import numpy as np

from wlb.config import NO_BOUND, PRESETS
from wlb.reproduce.experiment import Documents, Settings
from wlb.reproduce.systems import Bench
from wlb.simulate.named_jobs import PAPER_JOBS


def test_wlb_llm_is_algorithm_1_and_nobody_else_is():
    job = PAPER_JOBS["7b-128k"]
    bench = Bench(job, Documents(np.full(8, job.context_window), "made up"), 1, Settings())
    packing = bench.job("wlb-llm").packing
    assert (packing.method, packing.early_release, packing.max_delay) == ("variable_length", False, NO_BOUND)
    assert len(packing.outlier_thresholds) == 2
    assert bench.job("wlb-llm", packing={"max_delay": 3}).packing.max_delay == 3
    for preset in PRESETS.keys() - {"wlb-llm"}:
        assert bench.job(preset).packing.max_delay is None
