"""A dry run of a large job: what a rank holds is near what the memory model says, and what it receives is equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.job.config_file import load_config
from wlb.job.job import Job
from wlb.job.planner import StepPlanner
from wlb.sharding.latency import Shards
from wlb.training.dry_run.job import DryRun, Place, RankReport, distinct_roles, dry_run, rank_at
from wlb.training.dry_run.problems import find_problems
from wlb.training.dry_run.traffic import GRADIENTS, KEYS_AND_VALUES, STAGES, TENSOR_PARALLEL, WEIGHTS

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs").glob("*.toml"))
CONFIG = next(path for path in CONFIGS if path.stem == "7b_128k")
QUICK = ("tiny_elastic",)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    """The 7B job on its 64 GPUs with a layer for each stage, and few micro-batches."""
    folder = tmp_path_factory.mktemp("large")
    settings = ["model.layers=4", "packing.micro_batches=4", f"checkpoint.dir={folder}", f"metrics.dir={folder}"]
    return load_config(CONFIG, [*settings, f"data.store={folder / 'missing'}"])


@pytest.fixture(scope="module")
def result(config: JobConfig) -> DryRun:
    return dry_run(config)


def check_predictions(report: RankReport) -> set[str]:
    """That memory is within 10% of the model and traffic is the simulator's; the purposes it prices.

    So is each kind of memory, unless it is off by less than 1% of all.
    """
    assert abs(report.total.error or 0) < 0.1, report.role
    for kind, compared in report.memory.items():
        off = abs(compared.run - (compared.predicted or 0))
        assert off <= max(0.1 * compared.run, 0.01 * report.total.run), (report.role, kind, compared)
    priced = {purpose: compared for purpose, compared in report.traffic.items() if compared.predicted is not None}
    assert all(compared.run == compared.predicted for compared in priced.values()), (report.role, priced)
    return set(priced)


def test_a_rank_of_a_large_job_is_as_predicted(result):
    (report,) = result.ranks
    assert result.to_json()["gpus"] == 64
    assert check_predictions(report) == {WEIGHTS, GRADIENTS, TENSOR_PARALLEL, STAGES, KEYS_AND_VALUES}


def test_the_last_stage_is_as_predicted(config):
    """It alone has the loss, over a vocabulary that is split."""
    (report,) = dry_run(config, 56).ranks
    assert report.run.place.pp == 3
    check_predictions(report)


# Larger jobs repeat, over minutes, what the small ones show of every layer.
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.exhaustive) for path in CONFIGS],
    ids=lambda path: path.stem,
)
def test_a_shipped_configuration_runs_as_predicted(path, tmp_path):
    config = load_config(path, [f"checkpoint.dir={tmp_path}", f"metrics.dir={tmp_path}", f"data.store={tmp_path}/none"])
    found = dry_run(config, "all", "h100" if config.training.device == "cuda" else "cpu")
    assert ["does not exist" in problem for problem in found.found.problems] == [True]
    for report in found.ranks:
        check_predictions(report)


def test_a_rank_that_is_not_in_the_job_is_refused(config):
    with pytest.raises(UserError, match=r"rank 64 is not in a job of 64 ranks; give one from 0 to 63"):
        dry_run(config, 64)


def test_all_means_every_kind_of_rank(config):
    job = Job.from_config(config, "h100", vocab_size=32_000)
    job = replace(job, layout=replace(job.layout, dp=2))
    none = np.zeros((2, 1, 2))
    fields = dict.fromkeys(Shards._fields, none) | {
        "tokens": np.array([[[5, 6]], [[9, 4]]]),
        "received": np.array([[[0, 7]], [[0, 0]]]),
    }
    roles = distinct_roles(job, Shards(**fields))
    assert roles == {
        rank_at(job, Place(0, 1, 0, 0)): "first stage, most tokens",
        rank_at(job, Place(0, 1, 1, 0)): "first stage, fewest tokens",
        rank_at(job, Place(0, 0, 1, 0)): "first stage, most received",
        rank_at(job, Place(2, 1, 0, 0)): "middle stage, most tokens",
        rank_at(job, Place(3, 1, 0, 0)): "last stage, most tokens",
    }


def test_a_mixture_that_is_elsewhere_is_planned_on_synthetic_documents(config: JobConfig):
    stores = tuple({"store": name, "weight": 1.0} for name in ("a", "b"))
    found = find_problems(config.changed(data=config.data.changed(store=None, mixture=stores)), "h100")
    assert found.synthetic
    planned = next(StepPlanner(found.job, found.store.stored_lengths)).plan
    assert planned.tokens > 0
