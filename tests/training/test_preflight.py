"""What would stop or stall a job later is refused before it starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training.jobs import job, write_config, write_store
from wlb.documents.store.mixture import document_lengths
from wlb.errors import UserError
from wlb.job.config_file import load_config
from wlb.job.planner import StepPlanner
from wlb.training.preflight import check_job


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"head_dim": 3}}, r"head_dim = 3 is odd"),
        ({"model": {"layers": 2**31 - 1}}, r"layers = 2147483647; it must be at most 10000"),
        ({"model": {"name": "mixtral-8x7b"}}, r"the model has a mixture of experts .* simulated but not trained"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(tmp_path, changes, said):
    write_store(tmp_path / "store")
    with pytest.raises(UserError, match=said):
        check_job(job(tmp_path, **changes), 1)


def test_a_store_of_which_nothing_would_be_learnt_is_refused(tmp_path):
    store = write_store(tmp_path / "store")
    (tmp_path / "store.mask").write_bytes(bytes(store.tokens))
    with pytest.raises(UserError, match=r"has no label in .*store\.mask, so nothing would be learnt"):
        check_job(job(tmp_path), 1)


def test_a_step_of_the_most_micro_batches_is_checked_at_once(tmp_path):
    write_store(tmp_path / "store")
    large = job(
        tmp_path,
        model={"layers": 1000},
        packing={"micro_batches": 65_536, "max_length_factor": "auto"},
        training={"memory_gib": 1000.0},
    )
    assert check_job(large, 1).job.packing.length_factor == 4


def test_packing_by_a_solver_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    write_store(tmp_path / "store")
    config = job(tmp_path, packing={"method": "fixed_solver"})
    check_job(config, 1)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(UserError, match=r"pip install 'wlb-llm\[solver\]'"):
        check_job(config, 1)


def exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("section", "preset"),
    [
        ("parallel", "elastic"),
        ("packing", "elastic"),
        ("packing", "best"),
        *(exhaustive(section, "best") for section in ("parallel", "evaluation", "checkpoint", "metrics")),
        *(exhaustive(section, preset) for section in ("model", "data", "training") for preset in ("best", "elastic")),
        *(exhaustive("packing", preset) for preset in ("plain-4d", "fixed-4d", "wlb-llm")),
    ],
)
def test_a_huge_size_is_planned_or_refused_in_one_line(tmp_path, section, preset):
    """At once: a size that made it search or count for long would meet the time limit of a test."""
    write_store(tmp_path / "store")
    path = write_config(tmp_path, preset, parallel={"dp": 2})
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
        return f"{next(StepPlanner(checked.job, document_lengths(checked.store))).plan.tokens} tokens"
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("memory_gib", [4.0, 0.02])
def test_a_large_global_batch_of_pools_is_divided_until_it_fits_the_memory(tmp_path, memory_gib):
    write_store(tmp_path / "store")
    config = job(
        tmp_path,
        "elastic",
        parallel={"dp": 2},
        packing={"micro_batches": 640},
        training={"memory_gib": memory_gib},
    )
    packing = check_job(config, 2).job.packing
    assert packing.in_use()["global_batch"] == 640
    factor = packing.length_factor
    assert factor != "auto"
    assert (factor > 100) == (memory_gib == 4.0)
