"""DynamoLLM's pools by length (HPCA '25, arXiv 2408.00741), each with its own tensor-parallel degree and clock.

Prompts are binned by length. Every pool gets a number of instances, a degree and a clock, chosen to minimise energy
while prompts of every bin get their first token within its objective. If no division of the GPUs meets the
objectives, they are doubled. If the load exceeds what the GPUs can serve, pools run at full clock and are sized to
finish together. Neighbouring bins share a pool where that is better, since the paper merges bins that do not fill an
instance. An instance prefills in order of arrival, like ``tokens``; GPUs without a pool idle.

From the paper: pools by prompt length, and an exact program over instances, degrees and clocks. Assumed after it, and
not checked against its text: bounds of 256, 1,024 and 8,192 tokens, objectives of 5 times the latency of a prompt
alone, and clocks down to 0.4 of the full one. Ours: a last bin for longer prompts; an objective counts from the bin's
longest prompt on the fastest instance, and 1% may miss it; the load is known and steady, so one choice holds for the
whole run (the paper re-decides instances every 30 minutes, degrees every 5 minutes and clocks every 5 seconds). Its
bins by output length have no meaning in a prefill.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.workload import Costs, Hardware, ModelShape
from wlb.workload.weights import parameters
from wlb_studies.serving.batching import PrefillPlanner, Prompt
from wlb_studies.serving.job import PrefillJob
from wlb_studies.serving.power import POWER, GpuPower
from wlb_studies.serving.prefill import GpuGroup, PrefillRun, simulate_prefill

BIN_TOKENS = (256, 1024, 8192)  # longest prompt of each bin, except the last bin
SLACK = 5.0  # objective, in units of the latency of the bin's longest prompt alone
CLOCKS = (0.4, 0.6, 0.8, 1.0)  # shares of the full clock
_LATE = 0.01  # share of prompts that may miss the objective
_DOUBLINGS = 8  # largest slack; a load that needs more counts as too much
_WEIGHTS = 0.8  # assumed: largest share of GPU memory for weights, since keys and values need the rest

Integers = NDArray[np.int64]


class Instance(NamedTuple):
    """A tensor-parallel group at a clock."""

    tp: int
    clock: float
    workload: Costs


@dataclass(frozen=True)
class InstancePool:
    """Bins that share ``count`` instances."""

    bins: tuple[int, ...]
    instance: Instance
    count: int
    seconds: float  # until all prompts that arrive at once are done
    joules: float  # beyond idling

    @property
    def gpus(self) -> int:
        return self.count * self.instance.tp


def dynamollm(job: PrefillJob, on_progress: Callable[[int], None] = lambda prompts: None) -> PrefillRun:
    """Prefill the job's prompts in pools by length. Raises ``UserError`` as ``presets`` and ``PrefillPlanner`` do."""
    longest = int(job.lengths.argmax())
    PrefillPlanner(job.workload, job.token_budget, "tokens", job.chunked).check(Prompt(longest, job.lengths[longest]))
    first_token = np.zeros(len(job.lengths))
    passes, engines = [], 0
    for pool, numbers in choose_pools(job):
        lengths, one = job.lengths[numbers], pool.instance
        of_pool = replace(job, lengths=lengths, arrivals=job.arrivals[numbers], dp=pool.count, pp=1, lock_step=False)
        planner = PrefillPlanner(one.workload, job.token_budget, "tokens", job.chunked)
        group = GpuGroup(one.tp, 1, one.clock, pool.count, f"{lengths.min():,} to {lengths.max():,} tokens")
        run = simulate_prefill(of_pool, planner, group, on_progress)
        for each in run.passes:
            batches = [[chunk._replace(prompt=int(numbers[chunk.prompt])) for chunk in batch] for batch in each.batches]
            passes.append(each._replace(engine=engines + each.engine, batches=batches))
        first_token[numbers] = run.first_token_seconds
        engines += pool.count
    passes.sort(key=lambda each: (each.start, each.engine))
    return PrefillRun(passes, first_token, float((job.arrivals + first_token).max() - job.arrivals[0]))


def choose_pools(job: PrefillJob) -> list[tuple[InstancePool, Integers]]:
    """The pools, shortest prompts first, and the numbers of the prompts of each. Raises as ``presets`` does."""
    bin_of = np.searchsorted(BIN_TOKENS, job.lengths)
    choice = _Choice(job, presets(job)[2], [np.flatnonzero(bin_of == number) for number in np.unique(bin_of)])
    met = (pools for doublings in range(_DOUBLINGS) if (pools := choice.in_time(SLACK * 2**doublings)))
    return [(pool, choice.prompts(pool.bins)) for pool in next(met, None) or choice.soonest_done()]


def presets(job: PrefillJob) -> tuple[ModelShape, Hardware, GpuPower]:
    """The model and hardware behind the job's prices.

    Raises ``UserError`` for a measured profile or hardware with unknown watts.
    """
    if job.model is None or job.hardware is None:
        raise UserError(
            "dynamollm chooses degrees and clocks, and a measured profile prices one of each; leave it out of "
            "--methods, or give --model and --hardware instead of --profile"
        )
    if job.power is None:
        raise UserError(
            f"dynamollm weighs energy, and only the watts of {', '.join(POWER)} are known; leave it out of --methods"
        )
    return job.model, job.hardware, job.power


def degrees(job: PrefillJob) -> list[int]:
    """Powers of two that divide the heads, stay in a node and hold the weights; the largest if none does."""
    model, hardware, _ = presets(job)
    most = min(job.gpus, hardware.node_size)
    heads = math.gcd(model.heads, model.kv_heads)
    divisors = [tp for tp in (1, 2, 4, 8, 16, 32, 64) if tp <= most and heads % tp == 0]
    weights = parameters(model) * hardware.bytes_per_value
    return [tp for tp in divisors if weights <= tp * _WEIGHTS * hardware.memory_bytes] or divisors[-1:]


@dataclass(frozen=True)
class _Choice:
    """The choices for pools: the prompts of every nonempty bin, and instances of every degree and clock."""

    job: PrefillJob
    power: GpuPower
    bins: list[Integers]

    @cached_property
    def instances(self) -> list[Instance]:
        return [Instance(tp, clock, self.job.instance(tp, clock)) for tp in degrees(self.job) for clock in CLOCKS]

    @cached_property
    def alone(self) -> list[float]:
        """Seconds of each bin's longest prompt on the fastest instance."""
        return [min(self._longest(number, one) for one in self.instances) for number in range(len(self.bins))]

    def prompts(self, bins: Sequence[int]) -> Integers:
        return np.sort(np.concatenate([self.bins[number] for number in bins]))

    def in_time(self, slack: float) -> list[InstancePool] | None:
        """The pools with the least energy that meet objectives of ``slack`` times ``alone``; None if none do."""
        ways = (product(*(self._in_time(bins, slack) for bins in runs)) for runs in _runs(len(self.bins)))
        met = (pools for pools in chain.from_iterable(ways) if _gpus(pools) <= self.job.gpus)
        best = min(met, key=lambda pools: (sum(pool.joules for pool in pools), _gpus(pools)), default=None)
        return None if best is None else list(best)

    def soonest_done(self) -> list[InstancePool]:
        """The pools at full clock that finish all prompts soonest; the fewest of those."""
        full = [(one, range(1, self.job.gpus // one.tp + 1)) for one in self.instances if one.clock == 1.0]
        ways = []
        for runs in _runs(len(self.bins)):
            pools = [[pool for one, counts in full for pool in self._pools(bins, one, counts)] for bins in runs]
            ends = sorted({pool.seconds for of_run in pools for pool in of_run})
            first = bisect_left(ends, True, key=lambda end: _gpus(_smallest(pools, end)) <= self.job.gpus)
            if first < len(ends) and (smallest := _smallest(pools, ends[first])):
                ways.append(smallest)
        return min(ways, key=lambda pools: (max(pool.seconds for pool in pools), len(pools)))

    def _in_time(self, bins: tuple[int, ...], slack: float) -> list[InstancePool]:
        """The fewest sufficient instances of every kind, without kinds that another beats in GPUs and energy."""
        pools = [pool for one in self.instances if (pool := self._fewest(bins, one, slack))]
        return [pool for pool in pools if not any(_beats(other, pool) for other in pools)]

    def _fewest(self, bins: tuple[int, ...], one: Instance, slack: float) -> InstancePool | None:
        left = min(slack * self.alone[number] - self._longest(number, one) for number in bins)
        span = float(self.job.arrivals[-1] - self.job.arrivals[0])
        if left < 0 or span == 0.0:
            return None
        seconds = self._seconds(self.prompts(bins), one)
        load = (len(seconds) / span, float(seconds.mean()), float((seconds**2).mean()))
        counts = range(1, self.job.gpus // one.tp + 1)
        enough = bisect_left(counts, True, key=lambda count: waiting_seconds(*load, count, _LATE) <= left)
        return next(iter(self._pools(bins, one, counts[enough : enough + 1])), None)

    def _pools(self, bins: tuple[int, ...], one: Instance, counts: Sequence[int]) -> list[InstancePool]:
        """One of each of ``counts`` instances."""
        seconds = self._seconds(self.prompts(bins), one)
        total, longest = float(seconds.sum()), float(seconds.max())
        watts = one.tp * (self.power.watts(one.clock) - self.power.idle_watts)
        return [InstancePool(bins, one, count, max(total / count, longest), total * watts) for count in counts]

    def _longest(self, number: int, one: Instance) -> float:
        return float(self._seconds(self.bins[number], one).max())

    def _seconds(self, prompts: Integers, one: Instance) -> NDArray[np.float64]:
        """Each prompt's part of full passes."""
        lengths, budget = self.job.lengths[prompts], self.job.token_budget
        linear = float(one.workload.linear_seconds(budget, "forward")) / budget
        return np.asarray(one.workload.attention_seconds(lengths, "forward") + linear * lengths)


def _runs(bins: int) -> Iterator[list[tuple[int, ...]]]:
    """All ways to split a row of bins into runs."""
    for cuts in (cuts for count in range(bins) for cuts in combinations(range(1, bins), count)):
        yield [tuple(range(*bounds)) for bounds in pairwise((0, *cuts, bins))]


def _smallest(ways: list[list[InstancePool]], end: float) -> list[InstancePool] | None:
    """For every run of bins, the pool with the fewest GPUs that finishes by ``end``; None if a run has none."""
    in_time = [[pool for pool in of_run if pool.seconds <= end] for of_run in ways]
    return [min(one, key=lambda pool: (pool.gpus, pool.seconds)) for one in in_time] if all(in_time) else None


def _gpus(pools: Sequence[InstancePool] | None) -> float:
    return math.inf if pools is None else sum(pool.gpus for pool in pools)


def _beats(one: InstancePool, other: InstancePool) -> bool:
    """Whether ``one`` needs no more GPUs and energy, and less of one of them."""
    costs, of_other = (one.gpus, one.joules), (other.gpus, other.joules)
    return costs != of_other and costs[0] <= of_other[0] and costs[1] <= of_other[1]


def waiting_seconds(rate: float, mean: float, square: float, servers: int, share: float) -> float:
    """The wait that only a ``share`` of arrivals exceeds, with ``servers`` on one queue; inf if overloaded.

    ``rate`` arrivals a second (Poisson) take ``mean`` seconds, ``square`` on average when squared. The mean wait is
    that of M/M/c times (1 + CV^2) / 2 (Lee and Longton 1959; exact for one server), and those who wait do so for an
    exponential time (exact for M/M/c).
    """
    load = rate * mean
    if load >= servers:
        return math.inf
    blocked = 1.0  # Erlang B, by its recursion over the number of servers; then Erlang C
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    waiting = blocked / (1 - load / servers * (1 - blocked))
    if waiting <= share:
        return 0.0
    mean_of_waiting = square / mean / 2 / (servers - load)
    return mean_of_waiting * math.log(waiting / share)
