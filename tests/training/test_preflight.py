"""What would stop or stall a job later is refused before it starts."""

from __future__ import annotations

import sys

import pytest

from tests.training.jobs import job, write_store
from wlb.errors import UserError
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
    assert check_job(large, 1).config.packing.length_factor == 4


def test_packing_by_a_solver_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    write_store(tmp_path / "store")
    config = job(tmp_path, packing={"method": "fixed_solver"})
    check_job(config, 1)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(UserError, match=r"pip install 'wlb-llm\[solver\]'"):
        check_job(config, 1)
