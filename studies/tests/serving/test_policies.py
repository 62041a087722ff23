"""Every policy does the same work on the same GPUs, and is priced by the same rules."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from studies.tests.serving.jobs import FEWER, job_of, jobs
from wlb.errors import UserError
from wlb.workload import make_workload
from wlb_studies.serving.job import PrefillJob
from wlb_studies.serving.policies import POLICIES, policy
from wlb_studies.serving.prefill import GpuGroup, Pass, PrefillRun
from wlb_studies.serving.result import prefill_result


def served(name: str, job: PrefillJob) -> PrefillRun:
    return POLICIES[name].run(job, lambda prompts: None)


@pytest.mark.parametrize("name", POLICIES)
@FEWER
@given(job=jobs())
def test_every_policy_does_the_same_work(name: str, job: PrefillJob):
    run = served(name, job)
    tokens, area = np.zeros(len(job.lengths), np.int64), np.zeros(len(job.lengths), np.int64)
    for each in run.passes:
        for chunk in (chunk for batch in each.batches for chunk in batch):
            assert job.arrivals[chunk.prompt] <= each.start
            assert chunk.start == tokens[chunk.prompt], "chunks follow each other"
            tokens[chunk.prompt] = chunk.stop
            area[chunk.prompt] += (chunk.stop * (chunk.stop + 1) - chunk.start * (chunk.start + 1)) // 2
    assert tokens.tolist() == job.lengths.tolist()
    assert area.tolist() == (job.lengths * (job.lengths + 1) // 2).tolist()
    result = prefill_result(name, run, job)
    assert sum(group.tokens for group in result.groups) == job.lengths.sum()
    assert np.all(run.first_token_seconds > 0)


@pytest.mark.parametrize("name", POLICIES)
@FEWER
@given(job=jobs())
def test_no_policy_holds_more_gpus_than_there_are(name: str, job: PrefillJob):
    run = served(name, job)
    changes = []
    for each in run.passes:
        held = len(each.seconds) * each.group.gpus
        changes += [(each.start, held), (each.start + float(each.seconds.max()), -held)]
    # A pass may start in the moment in which another ends.
    changes = sorted((round(time, 9), change) for time, change in changes)
    assert np.cumsum([change for _, change in changes]).max() <= job.gpus
    result = prefill_result(name, run, job)
    assert result.gpu_seconds <= job.gpus * run.seconds * (1 + 1e-9)
    assert job.power is not None
    idle, full = job.power.idle_watts, job.power.full_watts
    assert idle * job.gpus * run.seconds < (result.energy_joules or 0) <= full * job.gpus * run.seconds * (1 + 1e-9)


def test_figures_of_a_run_by_hand():
    job = job_of([100, 300], arrivals=[1.0, 2.0], dp=2, tp=2)
    seconds = np.array([0.5, 1.5])
    passes = [
        Pass(0, 2.0, 3.5, seconds, [[], []], GpuGroup(2, 1, 1.0)),
        Pass(0, 3.5, 4.0, np.array([0.5, 0.5]), [[], []], GpuGroup(2, 1, 0.6)),
    ]
    result = prefill_result("x", PrefillRun(passes, np.array([2.5, 2.0]), 3.0), job)
    # Two ranks of two GPUs are held 1.5 s and 0.5 s.
    assert result.gpu_seconds == 4 * 1.5 + 4 * 0.5
    assert (result.p50_seconds, result.longest_seconds) == (2.25, 2.5)
    assert result.tokens_per_second == pytest.approx(400 / 3)
    assert result.busy == pytest.approx((1.0 + 0.5) / 2.0)
    # Four GPUs idle for 3 s at 64 W. They compute 2 x (0.5 + 1.5) GPU-seconds at 700 W, and 2 x (0.5 + 0.5) at
    # clock 0.6 with 0.75 of the voltage: 64 + 636 x 0.6 x 0.75^2 = 278.65 W.
    assert result.energy_joules == pytest.approx(4 * 3 * 64 + 4 * 636 + 2 * 636 * 0.6 * 0.75**2)


def test_without_watts_there_is_no_energy():
    lengths, arrivals = np.array([100, 200]), np.zeros(2)
    job = PrefillJob(lengths, arrivals, make_workload("tiny", "cpu"), 128)
    assert prefill_result("tokens", served("tokens", job), job).energy_joules is None


def test_mistakes_name_the_remedy():
    measured = PrefillJob(np.array([100]), np.zeros(1), make_workload("tiny", "cpu"), 128, cp=2)
    with pytest.raises(
        UserError, match="measured with tp = 1 and cp = 2, and cannot price another layout; give --model"
    ):
        policy("loongserve").check(measured)
    with pytest.raises(UserError, match="dynamollm chooses degrees and clocks, and a measured profile prices one"):
        policy("dynamollm").check(measured)
    job = job_of([100])
    with pytest.raises(UserError, match="only the watts of a100, h100, h200 are known; leave it out of --methods"):
        policy("dynamollm").check(replace(job, power=None))
    with pytest.raises(UserError, match=r"prefill method 'best' is unknown; choose from count, .*dynamollm"):
        policy("best")
