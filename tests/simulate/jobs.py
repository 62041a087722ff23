"""Small jobs, and documents for them."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.synthetic import sample_lengths
from wlb.job.job import Job
from wlb.simulate import simulated_job
from wlb.workload import ModelShape
from wlb.workload.shapes import Experts

WINDOW = 8192
SHAPE = ModelShape(hidden=1024, layers=8, heads=8, kv_heads=8, head_dim=128, ffn_hidden=2816, vocab_size=32_000)
ROUTED = replace(SHAPE, experts=Experts(16, 2, 512, shared_hidden=512, dense_layers=1))


def job(preset: str = "wlb-llm", shape: ModelShape = SHAPE, **settings: Any) -> Job:
    return simulated_job(shape, WINDOW, preset, **settings)


def documents(count: int = 2000, seed: int = 0) -> NDArray[np.int64]:
    return sample_lengths(count, WINDOW, seed)
