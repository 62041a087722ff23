"""Megatron-Core's contract for sequence-packing schedulers, held by ours, beside its own scheduler."""

from __future__ import annotations

import numpy as np
import pytest

data_schedule = pytest.importorskip("megatron.core.datasets.data_schedule", reason="needs Megatron-Core")
if not hasattr(data_schedule, "scheduler_map"):
    pytest.skip("needs Megatron-LM's main (0.20): this Megatron-Core has no scheduler_map", allow_module_level=True)

from wlb.errors import UserError  # noqa: E402  # Megatron-Core decides whether this file runs
from wlb.integrations.megatron.scheduler import BalancedScheduler, register  # noqa: E402
from wlb.workload import make_workload  # noqa: E402

LENGTHS = np.minimum(np.random.default_rng(0).lognormal(7, 1.3, 300).astype(int) + 16, 65536)
SAMPLES = [(index, int(length)) for index, length in enumerate(LENGTHS)]
MOST, CP, DP = 32768, 2, 4  # tokens per rank
DP_BALANCED = data_schedule.PackingSchedulerEnum.DP_BALANCED


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(data_schedule.scheduler_map, DP_BALANCED, data_schedule.DpBalancedScheduler)
    monkeypatch.setattr(BalancedScheduler, "workload", BalancedScheduler.workload)


def _slot_waiting(groups: list[list[list[int]]]) -> float:
    """Sum over slots of the dearest rank's seconds, over the mean: what ranks that run in lock-step wait."""
    seconds = make_workload("7b").document_seconds(LENGTHS)
    loads = np.array([[seconds[slot[rank * CP]].sum() for rank in range(DP)] for slot in groups])
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())


@pytest.mark.parametrize("group_size", [None, 3])
def test_every_sample_is_trained_once_within_the_limit(group_size: int | None):
    groups = BalancedScheduler(MOST, CP, DP, group_size).get_groups_and_subsamples(SAMPLES)
    assert len(groups) % (group_size or 1) == 0
    assert {len(slot) for slot in groups} == {CP * DP}
    for slot in groups:
        for first in range(0, CP * DP, CP):
            assert slot[first] == slot[first + 1]  # of one data-parallel rank
            assert 0 < LENGTHS[slot[first]].sum() <= MOST * CP
    assert sorted(i for slot in groups for i in [i for rank in range(DP) for i in slot[rank * CP]]) == [*range(300)]


def test_ranks_wait_less_than_under_the_scheduler_of_megatron():
    theirs = data_schedule.DpBalancedScheduler(MOST, CP, DP, None).get_groups_and_subsamples(SAMPLES)
    ours = BalancedScheduler(MOST, CP, DP, None).get_groups_and_subsamples(SAMPLES)
    assert len(ours) <= len(theirs)
    assert _slot_waiting(ours) < 1 + (_slot_waiting(theirs) - 1) / 2


def test_registered_it_is_what_megatron_makes():
    register("550m")
    ours = data_schedule.scheduler_map[DP_BALANCED](MOST, CP, DP, None)
    theirs = data_schedule.DpBalancedScheduler(MOST, CP, DP, None)
    assert isinstance(ours, BalancedScheduler)
    assert ours.get_required_sample_keys() == theirs.get_required_sample_keys()


def test_a_sample_over_the_limit_is_refused():
    with pytest.raises(UserError, match="over max_tokens = 65536"):
        BalancedScheduler(MOST, CP, DP, None).get_groups_and_subsamples([(0, 65537), *[(i, 10) for i in range(1, 9)]])
