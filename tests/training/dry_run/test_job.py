"""A dry run of a large job: what a rank holds is near what the memory model says, and what it receives is equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wlb.config import JobConfig
from wlb.config_file import load_config
from wlb.errors import UserError
from wlb.planning.job import JobSpec
from wlb.simulate.traffic import GRADIENTS, STAGES, TENSOR_PARALLEL, WEIGHTS
from wlb.training.dry_run.job import DryRun, Place, distinct_roles, dry_run, rank_at

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "7b_128k.toml"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    """The 7B job on its 64 GPUs with a layer for each stage, and few micro-batches."""
    folder = tmp_path_factory.mktemp("large")
    settings = ["model.layers=4", "packing.micro_batches=4", f"checkpoint.dir={folder}", f"metrics.dir={folder}"]
    return load_config(CONFIG, [*settings, f"data.store={folder / 'missing'}"])


@pytest.fixture(scope="module")
def result(config: JobConfig) -> DryRun:
    return dry_run(config)


def test_a_rank_of_a_large_job_is_as_predicted(result):
    (report,) = result.ranks
    assert result.to_json()["gpus"] == 64
    assert abs(report.total.error) < 0.1
    assert {kind: report.memory[kind].error for kind in ("parameters", "gradients", "optimizer")} == {
        "parameters": 0,
        "gradients": 0,
        "optimizer": 0,
    }
    priced = {purpose: compared for purpose, compared in report.traffic.items() if compared.predicted is not None}
    assert set(priced) >= {WEIGHTS, GRADIENTS, TENSOR_PARALLEL, STAGES}
    assert all(compared.run == compared.predicted for compared in priced.values())


def test_what_would_stop_the_job_is_said_at_once(result):
    (problem,) = result.found.problems
    assert "missing.idx does not exist" in problem


def test_a_rank_that_is_not_in_the_job_is_refused(config):
    with pytest.raises(UserError, match=r"rank 64 is not in a job of 64 ranks; give one from 0 to 63"):
        dry_run(config, 64)


def test_all_means_every_kind_of_rank(config):
    job = replace(JobSpec.from_config(config, "h100", vocab_size=32_000), dp=2)
    tokens = np.array([[5, 6], [9, 4]])
    roles = distinct_roles(job, tokens)
    assert roles[rank_at(job, Place(0, 1, 0, 0))] == "first stage, most tokens"
    assert roles[rank_at(job, Place(3, 1, 1, 0))] == "last stage, fewest tokens"
    assert len(roles) == 3 * 2
