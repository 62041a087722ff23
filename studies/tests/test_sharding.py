"""Sampling micro-batches, and the means over them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.errors import UserError
from wlb.sharding import make_shard_plan
from wlb.workload import make_workload
from wlb_studies.sharding import compare_strategy, sample_micro_batches


@given(st.lists(st.integers(1, 300), min_size=1, max_size=50), st.integers(1, 200))
def test_all_windows_together_are_the_documents(lengths, window):
    total = sum(lengths)
    if total < window:
        with pytest.raises(UserError, match="less than one context window"):
            sample_micro_batches(np.array(lengths), window, 1)
        return
    micro_batches = sample_micro_batches(np.array(lengths), window, 10**6)
    assert len(micro_batches) == total // window
    assert all(sum(micro_batch) == window for micro_batch in micro_batches)
    ends = set(np.cumsum(lengths)[np.cumsum(lengths) <= window * len(micro_batches)].tolist())
    cuts = {window * (index + 1) for index in range(len(micro_batches))}
    assert set(np.cumsum(np.concatenate(micro_batches)).tolist()) == ends | cuts


def test_samples_do_not_repeat_and_follow_the_seed():
    lengths = np.arange(1, 400)
    first, again, other = (sample_micro_batches(lengths, 1000, 20, seed) for seed in (0, 0, 1))
    assert [s.tolist() for s in first] == [s.tolist() for s in again] != [s.tolist() for s in other]
    assert len({tuple(s.tolist()) for s in first}) == 20


def test_means_over_micro_batches_and_what_adaptive_chose():
    workload = make_workload()
    micro_batches = [np.array([128] * 64), np.array([30_000, 300, 60_000]), np.array([40_000])]
    calls: list[None] = []
    result = compare_strategy("adaptive", micro_batches, 4, workload, on_progress=lambda: calls.append(None))
    assert len(calls) == result.micro_batches == 3
    assert result.chosen is not None
    assert result.chosen["per_document"] == pytest.approx(2 / 3)
    assert result.chosen["per_sequence"] == pytest.approx(1 / 3)
    gathered = [make_shard_plan(lengths, 4, "adaptive").kv_gather_fraction for lengths in micro_batches]
    assert result.kv_gather_fraction == pytest.approx(np.mean(gathered))
