"""The systems that experiments run."""

from __future__ import annotations

import numpy as np

from wlb.config import NO_BOUND, PRESETS
from wlb.packing import PACKERS
from wlb.packing.variable_length import VariableLengthOptions
from wlb.reproduce.experiment import Documents, Settings
from wlb.reproduce.systems import Bench
from wlb.simulate.job import PAPER_JOBS


def test_wlb_llm_is_algorithm_1_and_nobody_else_is():
    job = PAPER_JOBS["7b-128k"]
    bench = Bench(job, Documents(np.full(8, job.context_window), "made up"), 1, Settings())
    options = bench.job("wlb-llm").packing.options
    assert options == VariableLengthOptions(early_release=False, max_delay=NO_BOUND)
    assert bench.job("wlb-llm", packing={"max_delay": 3}).packing.options == options.model_copy(update={"max_delay": 3})
    for preset in PRESETS.keys() - {"wlb-llm"}:
        packing = bench.job(preset).packing
        assert packing.options == PACKERS[packing.method].options_class()
