"""Ranks of a small job, and documents for them."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.simulate.jobs import SHAPE
from wlb.simulate import simulated_job
from wlb_studies.policies.plan import Ranks

WINDOW = 16_384
CAPACITY = 4096


def ranks(count: int = 8, capacity: int = CAPACITY, window: int = WINDOW, **layout: Any) -> Ranks:
    return Ranks(simulated_job(SHAPE, window, "fixed-4d", dp=count, **layout), capacity)


def lengths_of(*lengths: int) -> np.ndarray:
    return np.array(lengths, np.int64)


# A step's documents: many short ones, and some of up to a window.
DOCUMENTS = st.tuples(
    st.lists(st.integers(1, 1500), min_size=20, max_size=60), st.lists(st.integers(1, WINDOW), min_size=1, max_size=6)
).map(lambda parts: np.array(parts[0] + parts[1], np.int64))
