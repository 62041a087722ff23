"""DynamoLLM: prompts stay in their bin's pool, pools in their GPUs, and the choice is the cheapest that is in time."""

import math
from collections import defaultdict
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given

from studies.tests.serving.jobs import FEWER, job_of, jobs
from wlb.errors import UserError
from wlb_studies.serving import dynamollm as dynamollm_module
from wlb_studies.serving.dynamollm import BIN_TOKENS, CLOCKS, SLACK, choose_pools, degrees, dynamollm, waiting_seconds


@FEWER
@given(jobs())
def test_pools_are_by_length_and_share_the_gpus(job):
    pools = choose_pools(job)
    assert sorted(np.concatenate([numbers for _, numbers in pools]).tolist()) == list(range(len(job.lengths)))
    spans = [(job.lengths[numbers].min(), job.lengths[numbers].max()) for _, numbers in pools]
    for (_, longest), (shortest, _) in combinations(spans, 2):
        assert any(longest <= bound < shortest for bound in BIN_TOKENS)
    assert sum(pool.gpus for pool, _ in pools) <= job.gpus
    for pool, _ in pools:
        assert pool.instance.tp in degrees(job)
        assert pool.instance.clock in CLOCKS


def test_prompts_are_priced_no_more_often_for_more_gpus(monkeypatch):
    price, times = dynamollm_module._Choice._seconds, [0]

    def counted(*of):
        times[-1] += 1
        return price(*of)

    monkeypatch.setattr(dynamollm_module._Choice, "_seconds", counted)
    for gpus in (8, 64):
        times.append(0)
        choose_pools(job_of([100, 2000, 9000], dp=gpus))
    assert times[-1] == times[-2]


@FEWER
@given(jobs())
def test_every_prompt_runs_in_its_pool(job):
    run = dynamollm(job)
    pools = choose_pools(job)
    pool_of = {int(prompt): n for n, (_, numbers) in enumerate(pools) for prompt in numbers}
    engines = defaultdict(set)
    for each in run.passes:
        (pool,) = {pool_of[chunk.prompt] for chunk in each.batches[0]}
        chosen = pools[pool][0]
        assert (each.group.tp, each.group.clock) == (chosen.instance.tp, chosen.instance.clock)
        assert sum(chunk.stop - chunk.start for chunk in each.batches[0]) <= job.token_budget
        engines[pool].add(each.engine)
    assert all(len(engines[n]) <= pool.count for n, (pool, _) in enumerate(pools))
    assert len(set().union(*engines.values())) == sum(map(len, engines.values())), "no instance serves two pools"


def seconds_of(job, lengths, tp, clock):
    workload = job.instance(tp, clock)
    linear = float(workload.linear_seconds(job.token_budget, "forward")) / job.token_budget
    return workload.attention_seconds(lengths, "forward") + linear * lengths


def least_joules(job, bins, slack) -> float:
    """Of every division of the GPUs among one pool for each of ``bins``, or one for both, that is in time; by trial."""
    span = job.arrivals[-1] - job.arrivals[0]
    alone = [min(seconds_of(job, one, tp, 1.0).max() for tp in degrees(job)) for one in bins]

    def pools(members):
        lengths = np.concatenate([bins[n] for n in members])
        for tp, clock in product(degrees(job), CLOCKS):
            seconds = seconds_of(job, lengths, tp, clock)
            for count in range(1, job.gpus // tp + 1):
                wait = waiting_seconds(len(lengths) / span, seconds.mean(), (seconds**2).mean(), count, 0.01)
                longest = [seconds_of(job, bins[n], tp, clock).max() for n in members]
                if all(wait + of_bin <= slack * alone[n] for n, of_bin in zip(members, longest, strict=True)):
                    watts = job.power.watts(clock) - job.power.idle_watts
                    yield count * tp, seconds.sum() * tp * watts

    apart = product(pools([0]), pools([1]))
    ways = [(a[0] + b[0], a[1] + b[1]) for a, b in apart] + list(pools([0, 1]))
    return min((joules for gpus, joules in ways if gpus <= job.gpus), default=np.inf)


@pytest.mark.parametrize("gap", [0.02, 0.05, 0.1])
def test_the_choice_takes_the_least_energy_of_all_that_are_in_time(gap):
    random = np.random.default_rng(1)
    short, long = random.integers(300, 1000, 30), random.integers(2000, 8000, 10)
    lengths = random.permutation(np.concatenate([short, long]))
    job = job_of(lengths, np.arange(40) * gap, dp=8)
    bins = [lengths[lengths <= 1024], lengths[lengths > 1024]]
    slack = next(s for s in (SLACK * 2**n for n in range(8)) if least_joules(job, bins, s) < np.inf)
    assert sum(pool.joules for pool, _ in choose_pools(job)) == pytest.approx(least_joules(job, bins, slack))


def test_a_light_load_clocks_down_to_the_most_efficient_clock_in_time():
    """One prompt of 1,000 tokens a second on 8 GPUs: none waits, so the objective is about service alone."""
    job = job_of([1000] * 20, np.arange(20.0), dp=8)
    ((pool, _),) = choose_pools(job)
    alone = min(seconds_of(job, job.lengths, tp, 1.0).max() for tp in degrees(job))
    run = dynamollm(job)
    assert pool.instance.clock < 1.0
    assert run.first_token_seconds.max() <= SLACK * alone * 1.01


def test_all_at_once_runs_at_the_full_clock_and_ends_as_early_as_any_pools_could():
    """Two long prompts and four short ones on two GPUs: a pool of long ones alone would end later than one of all."""
    job = job_of([8000, 8000, 100, 100, 100, 100], dp=2, budget=8192)
    ((pool, numbers),) = choose_pools(job)
    assert (pool.count, pool.instance.tp, pool.instance.clock, len(numbers)) == (2, 1, 1.0, 6)
    total = seconds_of(job, job.lengths, 1, 1.0).sum()
    assert pool.seconds == pytest.approx(total / 2)


def test_a_prompt_over_the_budget_is_named_by_its_number_in_the_job():
    with pytest.raises(UserError, match="prompt 2 has 5000 tokens, over the token budget 1024"):
        dynamollm(job_of([10, 900, 5000], chunked=False))


def test_degrees_hold_the_weights_and_divide_the_heads():
    assert degrees(job_of([10], dp=8)) == [1, 2, 4, 8]  # 16 GB
    assert degrees(job_of([10], dp=8, model="llama3-70b")) == [4, 8]  # 141 GB, of 64 GB on a GPU
    assert degrees(job_of([10], dp=8, model="qwen2.5-7b")) == [1, 2, 4]  # 4 key/value heads
    assert degrees(job_of([10], dp=8, model="llama3-405b")) == [8]  # fits none: the largest
    assert degrees(job_of([10], dp=3)) == [1, 2]


def test_one_server_with_exponential_service():
    """M/M/1: a share ``load`` waits, for an exponential time of mean 1 / (service rate - arrival rate)."""
    rate, mean = 0.5, 1.0
    assert waiting_seconds(rate, mean, 2 * mean**2, 1, 0.01) == pytest.approx(math.log(0.5 / 0.01) / (1 - 0.5))


def test_two_servers_with_exponential_service():
    """M/M/2 at a load of 1: Erlang C is 1/3."""
    assert waiting_seconds(1.0, 1.0, 2.0, 2, 0.01) == pytest.approx(math.log(1 / 3 / 0.01) / (2 - 1))


def test_more_servers_wait_less_and_too_few_forever():
    waits = [waiting_seconds(3.0, 1.0, 5.0, servers, 0.01) for servers in range(1, 12)]
    assert waits[:3] == [math.inf] * 3
    assert waits[-1] == 0.0
    assert np.all(np.diff(waits[3:]) <= 0)
