"""LoongServe's elastic sequence parallelism (SOSP '24, arXiv 2404.09526; github.com/LoongServe/LoongServe).

The GPUs form elastic instances of ``tp`` each. A macro-iteration takes prompts in order of arrival and divides prompts
and instances into groups. A group prefills its prompts whole, with their tokens striped over its instances. Their
number, the degree of parallelism, is chosen anew each time. A dynamic program over prompts by length minimises the
wait per token: the sum over prompts of their group's seconds over their length. A group that finishes early takes
waiting prompts that it can finish before the others do.

Instances keep the keys and values that pass them on the ring, so a prompt needs no migration when its group dissolves,
and a change of degree takes no time. Keys and values cross the links as in training: in parts, each while another one
is attended (``wlb.sharding.latency``).

Assumed: a macro-iteration takes prompts up to the token budget of all instances (the paper: up to a measured tipping
point and the free memory), decoding does not compete for instances, and ranks wait for the busiest link as in training.
Degrees above 8 are powers of two and a macro-iteration has at most 128 prompts, to bound the program.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb.sharding.latency import attending_seconds
from wlb.sharding.plan import exchange_parts
from wlb.workload import Costs
from wlb.workload.base import Seconds
from wlb_studies.serving.batching import Chunk
from wlb_studies.serving.job import PrefillJob
from wlb_studies.serving.prefill import LOOK_AHEAD, GpuGroup, Pass, PrefillRun

_ANY_DEGREE = 8  # every degree is tried up to here; powers of two above
_MOST_PROMPTS = 128  # prompts in a macro-iteration

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class SequencePrices:
    """Seconds of batches striped over a group; ``workload`` prices one instance."""

    workload: Costs

    def seconds(self, attention: ArrayLike, tokens: ArrayLike, degree: int) -> Seconds:
        """Seconds of batches, given their attention seconds on one instance and their tokens; in the shape of both.

        Stripes give every instance the same tokens and the same attention of every block of keys, so it attends a part
        ``1 / degree`` of its share over keys of its own.
        """
        attention, tokens = np.asarray(attention), np.asarray(tokens)
        held = -(-tokens // degree)
        linear = self.workload.linear_seconds(held, "forward")
        if degree == 1:
            alone: Seconds = attention + linear
            return alone
        share, received = attention / degree, tokens - held
        parts = exchange_parts(received, tokens, degree)
        copies = self.workload.copy_seconds(received, received, parts * held, "forward")
        exchange = self.workload.exchange_seconds(received, degree)
        own, others, arriving = (seconds[..., None] for seconds in (share / degree, share - share / degree, exchange))
        alike: Seconds = attending_seconds(own, others, arriving, parts)[..., 0] + (linear + copies)
        return alike


def divide(lengths: Integers, prices: SequencePrices, instances: int) -> list[tuple[int, int]]:
    """Prompts and instances of each group; groups are consecutive runs of prompts by decreasing length.

    Minimises exactly the sum over prompts of their group's seconds over their length. ``best[n, e]`` is the sum for the
    first n prompts on e instances; its last group has ``last[n, e]`` prompts and instances.
    """
    attention = np.append(0.0, np.cumsum(prices.workload.attention_seconds(lengths, "forward")))
    tokens, weight = (np.append(0, np.cumsum(values)) for values in (lengths, 1 / lengths))
    count = len(lengths)
    first, stop = np.triu_indices(count + 1, 1)
    best = np.full((count + 1, instances + 1), np.inf)
    best[0, 0] = 0.0
    last = np.zeros((count + 1, instances + 1, 2), np.int64)
    costs = {}
    for degree in _degrees(instances):
        cost = np.full((count + 1, count + 1), np.inf)  # cost of a group from one prompt to another
        seconds = prices.seconds(attention[stop] - attention[first], tokens[stop] - tokens[first], degree)
        cost[stop, first] = seconds * (weight[stop] - weight[first])
        costs[degree] = cost
    for n in range(1, count + 1):
        for degree, cost in costs.items():
            total = best[:n, : instances + 1 - degree] + cost[n, :n, None]
            before = total.argmin(axis=0)
            value = np.take_along_axis(total, before[None], 0)[0]
            better = np.flatnonzero(value < best[n, degree:])
            best[n, degree + better] = value[better]
            last[n, degree + better] = np.stack([n - before[better], np.full(len(better), degree)], axis=1)
    groups, instances = [], int(best[count].argmin())
    while count:
        of_group, degree = last[count, instances].tolist()
        groups.append((of_group, degree))
        count, instances = count - of_group, instances - degree
    return groups[::-1]


def _degrees(instances: int) -> list[int]:
    return [n for n in range(1, instances + 1) if n <= _ANY_DEGREE or n & (n - 1) == 0]


class _Server:
    """The queue, and the passes run so far."""

    def __init__(self, job: PrefillJob, on_progress: Callable[[int], None]) -> None:
        self.job, self.on_progress = job, on_progress
        self.prices = SequencePrices(job.instance(job.tp))
        self.lengths = job.lengths
        self.attention = self.prices.workload.attention_seconds(job.lengths, "forward")
        self.first_token = np.zeros(len(job.lengths))
        self.passes: list[Pass] = []
        self.queue: deque[int] = deque()  # prompts, oldest first
        self.arrived = 0

    @property
    def next_arrival(self) -> float:
        return float(self.job.arrivals[self.arrived]) if self.arrived < len(self.lengths) else np.inf

    def admit(self, now: float) -> None:
        while self.next_arrival <= now:
            self.queue.append(self.arrived)
            self.arrived += 1

    def dispatch(self, instances: int) -> list[int]:
        """The oldest prompts that fit the budgets of all instances together, longest first."""
        waiting = [*islice(self.queue, _MOST_PROMPTS)]
        fitting = np.searchsorted(np.cumsum(self.lengths[waiting]), instances * self.job.token_budget, side="right")
        taken = [self.queue.popleft() for _ in range(max(1, int(fitting)))]
        return sorted(taken, key=lambda prompt: -self.lengths[prompt])

    def fitting(self, seconds: float, degree: int) -> list[int]:
        """Waiting prompts that a group can finish within ``seconds``, up to its budget, or one that exceeds it alone.

        Oldest first: each prompt that still fits after the ones taken.
        """
        shown = [self.queue.popleft() for _ in range(min(LOOK_AHEAD, len(self.queue)))]
        waiting = np.array(shown, np.int64)
        taken: list[int] = []

        def fit(attention: Seconds, tokens: Integers, prompts: Integers | int) -> NDArray[np.bool_]:
            """Whether this many ``prompts`` fit together after the ones taken."""
            tokens, attention = tokens + self.lengths[taken].sum(), attention + self.attention[taken].sum()
            within_budget = (tokens <= degree * self.job.token_budget) | (len(taken) + prompts == 1)
            return np.asarray(within_budget & (self.prices.seconds(attention, tokens, degree) <= seconds))

        while len(waiting):
            # A prompt that does not fit now never will; of the others, the first few fit together.
            waiting = waiting[fit(self.attention[waiting], self.lengths[waiting], 1)]
            sums = np.cumsum(self.attention[waiting]), np.cumsum(self.lengths[waiting])
            together = fit(*sums, np.arange(1, len(waiting) + 1))
            count = len(waiting) if together.all() else int(together.argmin())
            taken += waiting[:count].tolist()
            waiting = waiting[count + 1 :]
        chosen = set(taken)
        self.queue.extendleft(prompt for prompt in reversed(shown) if prompt not in chosen)
        return taken

    def run(self, prompts: Sequence[int], start: float, first_instance: int, degree: int) -> float:
        """One group's pass; returns its end."""
        numbers = np.array(prompts)
        attention, tokens = self.attention[numbers].sum(), self.lengths[numbers].sum()
        seconds = float(self.prices.seconds(attention, tokens, degree))
        batch = [Chunk(prompt, 0, int(self.lengths[prompt])) for prompt in prompts]
        group = GpuGroup(self.job.tp, degree, count=self.job.gpus // self.job.tp // degree)
        self.passes.append(Pass(first_instance, start, start + seconds, np.array([seconds]), [batch], group))
        self.first_token[numbers] = start + seconds
        self.on_progress(len(batch))
        return start + seconds


def loongserve(job: PrefillJob, on_progress: Callable[[int], None] = lambda prompts: None) -> PrefillRun:
    """Prefill the job's prompts on elastic instances of its ``tp`` GPUs.

    Raises ``UserError`` for a measured profile with context parallelism, which cannot price a single instance.
    """
    instances = job.gpus // job.tp
    server = _Server(job, on_progress)
    now = 0.0
    while server.queue or server.next_arrival < np.inf:
        server.admit(now)
        if not server.queue:
            now = server.next_arrival
            continue
        now = _macro_iteration(server, now, instances)
    passes = sorted(server.passes, key=lambda each: (each.start, each.engine))
    first_token = server.first_token
    return PrefillRun(passes, first_token - job.arrivals, float(first_token.max() - job.arrivals[0]))


def _macro_iteration(server: _Server, now: float, instances: int) -> float:
    """Divide waiting prompts among all instances; early groups go on until all finish. Returns the end."""
    prompts = server.dispatch(instances)
    free: list[tuple[float, int, int]] = []  # when, first instance, degree
    used = taken = 0
    for count, degree in divide(server.lengths[prompts], server.prices, instances):
        heapq.heappush(free, (server.run(prompts[taken : taken + count], now, used, degree), used, degree))
        used, taken = used + degree, taken + count
    end = max(free)[0]
    if used < instances:
        heapq.heappush(free, (now, used, instances - used))
    while free[0][0] < end:
        time, first, degree = heapq.heappop(free)
        server.admit(time)
        if more := server.fitting(end - time, degree):
            time = server.run(more, time, first, degree)
        else:
            time = min(end, server.next_arrival)
        heapq.heappush(free, (time, first, degree))
    return end
