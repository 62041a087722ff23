"""A calibrated job loses less to wrong prices and to a slow GPU than one that keeps what it assumed."""

import argparse

import numpy as np
import pytest

from studies.benchmarks.calibration import assumed_job, losses, with_attention, with_slow_gpus
from wlb.documents.synthetic import sample_lengths


@pytest.mark.parametrize("what", ["attention", "slow GPU"])
def test_calibration_gets_most_of_it_back(what: str) -> None:
    lengths = sample_lengths(4000, 131_072, 0)
    job = assumed_job(8, lengths)
    true = (
        with_attention(job, 0.4) if what == "attention" else with_slow_gpus(job, 1, 0.7, None, np.random.default_rng(0))
    )
    ideal = true if what == "attention" else job
    row = losses(job, true, ideal, lengths, argparse.Namespace(steps=8, noise=0.02), draw=0)
    assert row["updates"] > 0
    assert row["calibrated"] < row["without"]
