"""L_max from memory: decided alike everywhere, kept on resume, and refused in numbers where nothing fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.programs import finished
from tests.training.distributed import run_ranks
from tests.training.jobs import VOCABULARY, WINDOW, job, read_steps, write_config, write_store
from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.job.job import JobSpec
from wlb.job.memory.step import predict_memory
from wlb.os_limits import usable_memory
from wlb.packing.options import LARGEST_AUTO_FACTOR
from wlb.training import preflight
from wlb.training.dry_run.problems import find_problems
from wlb.training.memory_budget import check_agreed, least_limit, memory_limit
from wlb.training.preflight import check_job
from wlb.training.runtime.failures import TrainingError

AUTO = {"packing": {"max_length_factor": "auto"}}


def auto_job(folder: Path, gib: float | None = None, **changes: dict[str, Any]) -> JobConfig:
    return job(folder, **(AUTO | ({"training": {"memory_gib": gib}} if gib else {}) | changes))


def spec(config: JobConfig) -> JobSpec:
    return JobSpec.from_config(config, "cpu", vocab_size=VOCABULARY)


def decide(config: JobConfig, saved: dict[str, Any] | None = None) -> JobConfig:
    """As before the job starts; ``saved`` is the identity in its checkpoint."""
    (store,) = config.data.stores
    if not store.with_suffix(".idx").exists():
        write_store(store)
    with mock.patch.object(preflight, "_saved_loader_state", return_value=saved and {"identity": saved}):
        return preflight.check_job(config, 1).config


def needed_gib(config: JobConfig, tokens: int) -> float:
    settings = spec(config).memory_settings
    return predict_memory(settings, [tokens] * settings.micro_batches).total / 2**30


def test_auto_fills_the_memory_there_is(tmp_path):
    config = auto_job(tmp_path)
    between = (needed_gib(config, 2 * WINDOW) + needed_gib(config, 3 * WINDOW)) / 2
    decided = decide(auto_job(tmp_path, between))
    assert 2 <= float(decided.packing.length_factor) < 3
    assert needed_gib(config, spec(decided).longest_micro_batch) <= between


def test_auto_is_bounded_where_memory_is_not(tmp_path):
    assert decide(auto_job(tmp_path)).packing.length_factor == LARGEST_AUTO_FACTOR


def test_a_job_that_continues_keeps_its_length(tmp_path):
    config = auto_job(tmp_path, checkpoint={"allow_changed_data": True})  # of which the identity here says little
    saved = {"packing.max_length_factor": 1.25}
    assert decide(config, saved).packing.length_factor == 1.25
    with mock.patch.object(preflight, "_saved_loader_state", return_value={"identity": saved}):
        assert find_problems(config, "cpu").job.packing.length_factor == 1.25


@pytest.mark.parametrize("factor", ["auto", 2.0])
def test_a_job_that_does_not_fit_is_refused_with_numbers(tmp_path, factor):
    with pytest.raises(UserError) as refusal:
        decide(auto_job(tmp_path, 1e-4, packing={"max_length_factor": factor}))
    message = str(refusal.value)
    assert "\n" not in message
    for part in (
        "weights",
        "optimizer",
        "activations",
        "0.0001 GiB of training.memory_gib",
        "packing.max_length_factor",
    ):
        assert part in message
    assert f"micro-batches of {WINDOW if factor == 'auto' else 2 * WINDOW} tokens" in message


def test_other_packing_methods_fill_windows(tmp_path):
    config = decide(auto_job(tmp_path, packing={"method": "sequential", "max_length_factor": 3.0}))
    assert spec(config).longest_micro_batch == WINDOW


def test_processes_share_the_memory_of_a_machine(tmp_path):
    training = job(tmp_path).training
    alone, shared = (memory_limit(training, "cpu", processes).number_of_bytes for processes in (1, 4))
    assert alone == pytest.approx(4 * shared)
    assert alone < usable_memory()


def _agree(folder: Path) -> float:
    """Rank 1's machine has less memory."""
    config = auto_job(folder)
    gib = needed_gib(config, 2 * WINDOW) if dist.get_rank() else None
    limit = least_limit(auto_job(folder, gib).training, "cpu", 1)
    job = check_job(config, 1, limit).job
    check_agreed(job)
    with pytest.raises(TrainingError, match="ranks decided on different jobs"):
        check_agreed(job.with_length_factor(1.0 + dist.get_rank()))
    return float(job.packing.length_factor)


def test_ranks_agree_on_the_least(tmp_path):
    write_store(tmp_path / "store")
    assert run_ranks(2, _agree, tmp_path) == [2.0, 2.0]


def _train(path: Path, *overrides: str) -> str:
    """Train as a job of one process; what it says."""
    arguments = [argument for override in overrides for argument in ("--set", override)]
    done = finished("-m", "wlb.training", path, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_job_trains_and_continues_at_the_length_it_decided_on(tmp_path):
    write_store(tmp_path / "store")
    checkpoints = {"dir": str(tmp_path / "checkpoints")}
    gib = needed_gib(auto_job(tmp_path, checkpoint=checkpoints), 2 * WINDOW)
    path = write_config(tmp_path, packing=AUTO["packing"], training={"memory_gib": gib}, checkpoint=checkpoints)
    for steps, memory in ((2, gib), (3, 1)):
        said = _train(path, f"training.steps={steps}", f"training.memory_gib={memory}")
        assert f"micro-batches of up to {2 * WINDOW} tokens" in said
    assert [step["step"] for step in read_steps(tmp_path)] == [1, 2, 3]


def test_an_over_budget_job_is_refused_before_it_starts(tmp_path):
    write_store(tmp_path / "store")
    with pytest.raises(UserError, match=r"over the 0.0001 GiB of training.memory_gib"):
        check_job(job(tmp_path, training={"memory_gib": 1e-4}), 1)
