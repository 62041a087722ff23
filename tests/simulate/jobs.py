"""Small jobs, and documents for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.synthetic import sample_lengths
from wlb.simulate import SimulatedJob, simulated_job
from wlb.workload import ModelShape, hardware_preset

WINDOW = 8192
SHAPE = ModelShape(hidden=1024, layers=8, heads=8, kv_heads=8, head_dim=128, ffn_hidden=2816, vocab_size=32_000)
# A block of this shape computes for less time than its launches take, which would hide what is balanced.
HARDWARE = replace(hardware_preset("h100"), block_seconds=0.0)


def job(preset: str = "wlb-llm", **settings: Any) -> SimulatedJob:
    return simulated_job(SHAPE, WINDOW, preset, **{"hardware": HARDWARE} | settings)


def documents(count: int = 2000, seed: int = 0) -> NDArray[np.int64]:
    return sample_lengths(count, WINDOW, seed)
