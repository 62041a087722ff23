"""Ratios of two systems that ran the same documents, and the samplers that a table describes by a formula."""

from dataclasses import replace

import numpy as np
import pytest

from studies.tests.published.test_batches import measured_as_predicted, rows_of, run_of
from studies.tests.published.test_pipeline_stages import ROW
from wlb_studies.published.ratios import SystemRatio, ratio_summaries, system_ratios
from wlb_studies.published.samplers import _SAMPLERS, _steps, is_sampled, sampled_row
from wlb_studies.published.whole_steps import whole_step_row

SAMPLED = {
    "table": "t",
    "repo": "huggingface/transformers",
    "commit": "c",
    "path": "p",
    "hardware": "RTX 5090 x 2",
    "model": "Qwen2.5-0.5B-Instruct",
    "precision": "BF16",
    "gpus": 2,
    "tp": 1,
    "cp": 1,
    "pp": 1,
    "seq_len": 1024,
    "global_batch": 32,
    "micro_batch": 8,
    "recompute": "full",
    "metric": "seconds/step",
    "value": 0.4,
    "data": "padded rows; 1,600 lengths lognormvariate(mu=5.0, sigma=1.0) clamped to [16, 1024]",
    "stack": {"attention": "sdpa", "compiled": False, "weights": "kept"},
    "arm": "random (distributed sampler)",
}


def test_systems_are_compared_on_batches_of_the_same_documents_in_one_folder():
    plain = measured_as_predicted(run_of("baseline", "folder/a.json"), "lists dealt in turn")
    balanced = measured_as_predicted(run_of("d2", "folder/b.json"), "attention level")
    elsewhere = measured_as_predicted(run_of("d2", "elsewhere/c.json"), "attention level")
    others = measured_as_predicted(run_of("d2", "folder/d.json", lists=4), "attention level")
    (ratio,) = system_ratios([], rows_of(plain, balanced, elsewhere, others))
    assert ratio[1:6] == ("folder/b.json", "DistCA", "folder/a.json", "plain", 8)
    assert ratio.measured == pytest.approx(ratio.predicted)
    faster = [replace(row, measured_seconds=row.measured_seconds / 2) for row in rows_of(balanced)]
    (ratio,) = system_ratios([], [*rows_of(plain), *faster])
    assert ratio.measured == pytest.approx(ratio.predicted / 2)


def test_rows_of_one_job_are_compared_with_the_first_of_another_system():
    rows = [
        {**ROW, "policy": "even", "stage_blocks": [8] * 4},
        {**ROW, "policy": "even", "stage_blocks": [8] * 4, "value": 1450.0},  # the same system once more
        {**ROW, "policy": "fewer", "value": 1200.0},
        {**ROW, "policy": "even", "model": "gpt-4b-128k"},  # another job
        {**ROW, "policy": "odd", "stage_blocks": [8] * 5},  # no prediction
    ]
    predictions = [whole_step_row(row) for row in rows]
    (ratio,) = system_ratios(rows, predictions)
    assert (ratio.system, ratio.base_system) == ("fewer", "even")
    assert ratio.measured == pytest.approx(0.8)
    even, fewer = (predictions[place].predicted_seconds or 0 for place in (0, 2))
    assert ratio.predicted == fewer / even


def test_a_summary_of_ratios_by_hand():
    ratios = [SystemRatio("k", "", "", "", "", 1, measured, 0.8) for measured in (0.79, 0.8, 0.9)]
    (found,) = ratio_summaries(ratios)
    assert (found.kind, found.pairs) == ("k", 3)
    assert found[2:] == pytest.approx((0.0, 1.0, -10.0))


@pytest.mark.parametrize("arm", _SAMPLERS)
def test_every_sampler_trains_the_drawn_documents_padded(arm):
    steps = [[np.array(one) for one in step] for step in _steps(SAMPLED, _SAMPLERS[arm])]
    assert {len(step) for step in steps} == {4}  # two micro-batches of two ranks
    assert {sum(map(len, step)) for step in steps} == {32}
    assert len(steps) == 50
    assert all(len({*one.tolist()}) == 1 for step in steps for one in step)
    if arm != "batch_rebalance":
        assert all(len(one) == 8 for step in steps for one in step)


def test_less_padding_is_faster():
    arms = ("random (distributed sampler)", "group_by_length", "batch_rebalance")
    rows = [{**SAMPLED, "arm": arm} for arm in arms]
    random, grouped, balanced = (sampled_row(row).predicted_seconds or 0 for row in rows)
    assert random > 1.3 * balanced
    assert random > 1.3 * grouped
    ratios = system_ratios(rows, [sampled_row(row) for row in rows])
    assert [one.predicted for one in ratios] == [grouped / random, balanced / random]


@pytest.mark.parametrize("ranks", [1, 2])
def test_batch_rebalance_is_that_of_transformers(ranks: int):
    module = pytest.importorskip("transformers.trainer_pt_utils")
    lengths = np.random.default_rng(3).integers(16, 1024, 320)
    steps = [*_SAMPLERS["batch_rebalance"](lengths, ranks, 2, 4)]
    for rank in range(ranks):
        theirs = module.BatchRebalanceSampler(lengths.tolist(), 8 * ranks, ranks, 2, shuffle=False, rank=rank)
        ours = [sorted(run.tolist()) for step in steps for run in step[rank]]
        assert ours == [sorted(lengths[batch].tolist()) for batch in theirs]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": 2}, "its tp, cp or pp is over 1"),
        ({"micro_batch": 64}, "has no micro-batch of 64 for each of 2 GPUs"),
        ({"data": str(SAMPLED["data"]).replace("1,600", "10")}, "its documents fill no step"),
    ],
)
def test_samplers_without_a_step_have_a_reason(changes, reason):
    assert reason in str(sampled_row({**SAMPLED, **changes}).reason)


def test_an_unknown_sampler_is_named():
    assert is_sampled(SAMPLED)
    assert not is_sampled(ROW)
    assert "its arm is unknown here: sorted; choose one of random" in str(
        sampled_row({**SAMPLED, "arm": "sorted"}).reason
    )
