"""What is decided and refused before a job starts, its L_max by memory above all."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from tests.cases import in_turn
from tests.programs import finished
from tests.training.distributed import run_ranks
from tests.training.jobs import VOCABULARY, WINDOW, job, read_steps, write_config, write_store
from tests.workload.profiles import analytic_profile
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.job.config_file import load_config
from wlb.job.job import USABLE_SHARE, Job
from wlb.job.memory.walk import predict_memory
from wlb.job.planner import StepPlanner
from wlb.os_limits import usable_memory
from wlb.packing.options import LARGEST_AUTO_FACTOR
from wlb.training import preflight
from wlb.training.dry_run import dry_run, find_problems
from wlb.training.preflight import check_agreed, check_job, memory_limit
from wlb.training.process import TrainingError
from wlb.workload.profile import write_profile

EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_hidden": 8}


@in_turn(
    ("changes", "said"),
    [
        ({"model": {"head_dim": 3}}, r"head_dim = 3, which is odd"),
        ({"model": {"layers": 2**31 - 1}}, r"layers = 2147483647; it must be at most 10000"),
        ({"training": {"balance_loss": 0.1}}, r"training.balance_loss has no effect, because the model has no experts"),
        (
            {"model": {"router": "sigmoid"}},
            r"model.router has no effect, because the model has no experts; leave it out",
        ),
        (
            {"model": EXPERTS, "training": {"router_bias_rate": 0.1}},
            r"router_bias_rate has no effect, because the model has no sigmoid routers",
        ),
        ({"model": EXPERTS, "parallel": {"tp": 2}}, r"tp = 2 cannot split experts, .*; set parallel.ep to 2 or more"),
        ({"model": {"name": "gpt-oss-20b"}}, r"the model has full attention in every few .* simulated but not trained"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(folder, changes, said):
    with pytest.raises(UserError, match=said):
        check_job(job(folder, **changes), 1)


def test_a_store_of_which_nothing_would_be_learnt_is_refused(folder):
    (folder / "store.mask").write_bytes(bytes(TokenStore.open(folder / "store").tokens))
    with pytest.raises(UserError, match=r"store has no labels \(PREFIX\.mask\) or .*, so there is nothing to learn"):
        check_job(job(folder), 1)


def test_a_step_of_the_most_micro_batches_is_checked_at_once(folder):
    large = job(
        folder,
        "wlb-llm",
        model={"layers": 1000},
        packing={"global_batch": 65_536, "max_length_factor": "auto"},
        training={"memory_gib": 1000.0},
    )
    assert check_job(large, 1).job.packing.max_length_factor == 4


def test_the_trainer_plans_by_a_measured_profile(folder):
    counted = check_job(job(folder), 1).job
    tokens = (16, 64, 256, 4096)
    write_profile(analytic_profile(counted.shape, "cpu", tokens, times=0.5), folder / "profile.json")
    measured = check_job(job(folder, training={"profile": str(folder / "profile.json")}), 1).job
    of_lengths = [one.packing_prices.document_seconds([100, 1000]) for one in (counted, measured)]
    np.testing.assert_allclose(of_lengths[1], of_lengths[0] / 2, rtol=0.05)
    other = analytic_profile(replace(counted.shape, layers=counted.shape.layers + 1), "cpu", tokens)
    write_profile(other, folder / "other.json")
    with pytest.raises(UserError, match=r"measured with another model \(layers \d+, not \d+\)"):
        check_job(job(folder, training={"profile": str(folder / "other.json")}), 1)
    with pytest.raises(UserError, match=r"none\.json does not exist; measure one with"):
        check_job(job(folder, training={"profile": str(folder / "none.json")}), 1)


OTHER_SECTIONS = ("evaluation", "checkpoint", "model", "data", "training")
OTHER_PACKING = ("plain-4d", "fixed-4d", "wlb-llm")


@pytest.mark.parametrize(
    ("section", "preset"),
    [
        ("parallel", "balanced"),
        ("packing", "balanced"),
        *(pytest.param(section, "balanced", marks=pytest.mark.exhaustive) for section in OTHER_SECTIONS),
        *(pytest.param("packing", preset, marks=pytest.mark.exhaustive) for preset in OTHER_PACKING),
    ],
)
def test_a_huge_size_is_planned_or_refused_in_one_line(folder, section, preset):
    """At once: a size that made it search or count for long would meet the time limit of a test."""
    path = write_config(folder, preset, parallel={"dp": 2})
    fields = type(getattr(load_config(path), section)).model_fields
    sizes = [name for name, field in fields.items() if "int" in str(field.annotation)]
    assert sizes
    said = [
        first_step_or_error(path, f"{section}.{setting}={value}")
        for setting in sizes
        for value in (65_537, 10**9, 2**31 - 1, 2**31, 2**63)
    ]
    assert [line for line in said if "\n" in line] == []


def first_step_or_error(config: Path, setting: str) -> str:
    try:
        checked = check_job(load_config(config, [setting]), 1)
        return f"{next(StepPlanner(checked.job, checked.store.stored_lengths)).plan.tokens} tokens"
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("memory_gib", [4.0, 0.02])
def test_a_large_global_batch_of_pools_is_divided_until_it_fits_the_memory(folder, memory_gib):
    config = job(
        folder,
        "balanced",
        parallel={"dp": 2},
        packing={"global_batch": 640, "grouping": "even"},
        training={"memory_gib": memory_gib},
    )
    packing = check_job(config, 2).job.packing
    assert packing.in_use()["global_batch"] == 640
    factor = packing.max_length_factor
    assert factor != "auto"
    assert (factor > 100) == (memory_gib == 4.0)


def test_the_configuration_stays_as_it_was_given(folder):
    """What it leaves "auto" is decided in the job alone; the job that is trained has nothing left to decide."""
    config = job(folder, "balanced", parallel={"dp": 2, "cp": 2}, packing={"max_length_factor": "auto"})
    checked = check_job(config, 4)
    assert checked.config == config
    assert checked.config.parallel.pool == checked.config.packing.max_length_factor == "auto"
    assert checked.job.pools_decided
    assert checked.job.packing.max_length_factor != "auto"


AUTO = {"packing": {"max_length_factor": "auto"}}


def auto_job(folder: Path, gib: float | None = None, **changes: dict[str, Any]) -> JobConfig:
    return job(folder, "wlb-llm", **(AUTO | ({"training": {"memory_gib": gib}} if gib else {}) | changes))


def spec(config: JobConfig) -> Job:
    return Job.from_config(config, "cpu", vocab_size=VOCABULARY)


def decide(config: JobConfig, saved: dict[str, Any] | None = None) -> Job:
    """As before the job starts; ``saved`` are the settings of packing in its checkpoint."""
    store = config.data.store
    assert isinstance(store, str)
    if not Path(f"{store}.idx").exists():
        write_store(Path(store))
    with mock.patch.object(preflight, "_saved_loader_state", return_value=saved and {"settings": {"packing": saved}}):
        return preflight.check_job(config, 1).job


def needed_gib(config: JobConfig, tokens: int) -> float:
    job = spec(config)
    return predict_memory(job, [tokens] * job.rank_micro_batches).total / 2**30


def test_auto_fills_the_memory_there_is(tmp_path):
    config = auto_job(tmp_path)
    between = (needed_gib(config, 2 * WINDOW) + needed_gib(config, 3 * WINDOW)) / 2
    decided = decide(auto_job(tmp_path, between))
    assert 2 <= float(decided.packing.max_length_factor) < 3
    assert needed_gib(config, decided.max_tokens) <= between
    assert decide(config).packing.max_length_factor == LARGEST_AUTO_FACTOR  # where memory is no limit


def test_a_job_that_continues_keeps_its_length(tmp_path):
    config = auto_job(tmp_path)
    saved = {"packing.max_length_factor": 1.25}
    with mock.patch.object(preflight, "check_settings"):  # the state here says little
        assert decide(config, saved).packing.max_length_factor == 1.25
    with mock.patch.object(preflight, "_saved_loader_state", return_value={"settings": {"packing": saved}}):
        assert find_problems(config, "cpu")[0].job.packing.max_length_factor == 1.25


def test_a_mixture_that_is_elsewhere_is_planned_on_synthetic_documents(tmp_path):
    config = job(tmp_path)
    stores = tuple({"store": name, "weight": 1.0} for name in ("a", "b"))
    found = dry_run(config.changed(data=config.data.changed(store=None, mixture=stores)))
    assert (found.synthetic, len(found.problems)) == (True, 1)
    assert found.simulated is not None


@pytest.mark.parametrize("factor", ["auto", 2.0])
def test_a_job_that_does_not_fit_is_refused_with_numbers(tmp_path, factor):
    with pytest.raises(UserError) as refusal:
        decide(auto_job(tmp_path, 1e-4, packing={"max_length_factor": factor}))
    message, limit = str(refusal.value), "0.0001 GiB of training.memory_gib"
    assert "\n" not in message
    for part in ("weights", "optimizer", "activations", limit, "packing.max_length_factor"):
        assert part in message
    assert f"micro-batches of {WINDOW if factor == 'auto' else 2 * WINDOW} tokens" in message


def test_processes_share_the_memory_of_a_machine():
    alone, shared = (memory_limit("cpu", processes).number_of_bytes for processes in (1, 4))
    assert alone == pytest.approx(4 * shared)
    assert alone < usable_memory()


def _agree(folder: Path) -> float:
    """Rank 1's machine has less memory."""
    config = auto_job(folder)
    gib = needed_gib(config, 2 * WINDOW) / USABLE_SHARE if dist.get_rank() else 1000
    with mock.patch.object(preflight, "usable_memory", return_value=gib * 2**30):
        job = check_job(config, 1).job
    check_agreed(job)
    with pytest.raises(TrainingError, match="ranks decided on different jobs"):
        check_agreed(job.with_length_factor(1.0 + dist.get_rank()))
    return float(job.packing.max_length_factor)


def test_ranks_agree_on_the_least(folder):
    assert run_ranks(2, _agree, folder) == [2.0, 2.0]


def _train(path: Path, *overrides: str) -> str:
    """Train as a job of one process; what it says."""
    arguments = [argument for override in overrides for argument in ("--set", override)]
    done = finished("-m", "wlb.training", path, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_job_trains_and_continues_at_the_length_it_decided_on(folder):
    checkpoints = {"dir": str(folder / "checkpoints")}
    gib = needed_gib(auto_job(folder, checkpoint=checkpoints), 2 * WINDOW)
    path = write_config(
        folder, "wlb-llm", packing=AUTO["packing"], training={"memory_gib": gib}, checkpoint=checkpoints
    )
    for steps, memory in ((2, gib), (3, 1)):
        said = _train(path, f"training.steps={steps}", f"training.memory_gib={memory}")
        assert f"micro-batches of up to {2 * WINDOW} tokens" in said
    assert [step["step"] for step in read_steps(folder)] == [1, 2, 3]


def test_a_directory_that_cannot_be_looked_at_is_not_taken_for_one(tmp_path: Path):
    preflight._check_could_write("metrics.dir", tmp_path / ("a" * 300) / "metrics")  # Path.exists would raise
