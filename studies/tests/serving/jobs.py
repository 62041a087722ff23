"""Prefill jobs for the tests of policies."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from wlb.workload import hardware_preset, make_workload, model_shape
from wlb_studies.serving.job import PrefillJob
from wlb_studies.serving.power import POWER

BUDGET = 1024
FEWER = settings(max_examples=settings().max_examples // 3)  # for what takes long


def job_of(lengths, arrivals=None, *, model="llama3-8b", hardware="h100", budget=BUDGET, **layout) -> PrefillJob:
    shape, rates = model_shape(model), hardware_preset(hardware)
    tp, cp = layout.get("tp", 1), layout.get("cp", 1)
    return PrefillJob(
        np.array(lengths),
        np.zeros(len(lengths)) if arrivals is None else np.array(arrivals, np.float64),
        make_workload(shape, rates, tp, cp),
        budget,
        model=shape,
        hardware=rates,
        power=POWER[hardware],
        **layout,
    )


@st.composite
def jobs(draw, longest=16 * BUDGET) -> PrefillJob:
    """Few prompts of all lengths, at once or over some seconds, on few GPUs."""
    lengths = draw(st.lists(st.one_of(st.integers(1, 300), st.integers(1, longest)), min_size=1, max_size=25))
    gap = draw(st.sampled_from([0.0, 0.02, 0.5]))
    gaps = draw(st.lists(st.floats(0, 2 * gap), min_size=len(lengths), max_size=len(lengths)))
    layout = {"dp": draw(st.integers(1, 5)), "tp": draw(st.sampled_from([1, 2]))}
    return job_of(lengths, np.cumsum(gaps), **layout)
