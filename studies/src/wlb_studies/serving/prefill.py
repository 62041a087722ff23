"""Prefill of a queue of prompts, pass by pass: seconds until each prompt's first token, and tokens per second.

Prompts arrive; whenever ranks are free, ``serving.batching`` plans what they run next. Ranks in lock step start every
pass together and wait for the slowest; independent ranks each take from the common queue when they are free. A
pass runs through ``pp`` stages of equal cost, and the next one enters as soon as the first stage is free. A prompt has
its first token when the pass with its last chunk leaves the last stage.

Left out: decoding, K/V memory, scheduling time, and that only a prompt's last token needs the output head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb_studies.serving.batching import ChunkBatch, PrefillPlanner, Prompt
from wlb_studies.serving.job import PrefillJob

LOOK_AHEAD = 1024  # oldest prompts that the planner sees


@dataclass(frozen=True)
class GpuGroup:
    """GPUs that compute one rank's part of a pass together, and the prompts they serve."""

    tp: int = 1
    cp: int = 1
    clock: float = 1.0  # share of the full clock
    count: int = 1  # number of such groups
    prompts: str = "all prompts"

    @property
    def gpus(self) -> int:
        return self.tp * self.cp


class Pass(NamedTuple):
    """One forward pass of an engine: the ``seconds`` that each rank computes and its ``batches``."""

    engine: int
    start: float
    end: float
    seconds: NDArray[np.float64]
    batches: list[ChunkBatch]
    group: GpuGroup = GpuGroup()  # of each rank


@dataclass(frozen=True)
class PrefillRun:
    """All passes in order of start, and the seconds from each prompt's arrival to its first token."""

    passes: list[Pass]
    first_token_seconds: NDArray[np.float64]  # (prompts,)
    seconds: float  # from the first arrival to the last first token


@dataclass
class _Waiting:
    """A prompt in progress; ``place`` is the engine and the rank that hold its keys."""

    arrived_in: int  # passes run before it arrived
    done: int = 0
    place: tuple[int, int] | None = None


class _Engine:
    """Ranks that run their passes together, and when each of their stages becomes free."""

    def __init__(self, number: int, ranks: int, pp: int) -> None:
        self.number, self.ranks = number, ranks
        self.passes = 0
        self.free = [0.0] * pp

    def run(self, start: float, seconds: float) -> float:
        """Push a pass through the stages; returns when it leaves the last."""
        self.passes += 1
        end = start
        for stage, free in enumerate(self.free):
            end = max(end, free) + seconds / len(self.free)
            self.free[stage] = end
        return end


def simulate_prefill(
    job: PrefillJob,
    planner: PrefillPlanner,
    group: GpuGroup = GpuGroup(),
    on_progress: Callable[[int], None] = lambda prompts: None,
) -> PrefillRun:
    """Serve the job's prompts with its ``dp`` ranks, each a ``group`` in each of its ``pp`` stages.

    ``on_progress`` gets the number of prompts just finished. Raises ``UserError`` without prompts, and like
    ``planner.plan``.
    """
    lengths, arrivals = job.lengths, job.arrivals
    if not len(lengths):
        raise UserError("there are no prompts to prefill; give at least one length")
    together = (job.dp,) if job.lock_step else (1,) * job.dp
    engines = [_Engine(number, ranks, job.pp) for number, ranks in enumerate(together)]
    queue: dict[int, _Waiting] = {}
    first_token = np.zeros(len(lengths))
    passes: list[Pass] = []
    arrived = 0
    while queue or arrived < len(lengths):
        engine = min(engines, key=lambda engine: engine.free[0])
        now = engine.free[0]
        while arrived < len(lengths) and arrivals[arrived] <= now:
            queue[arrived] = _Waiting(engine.passes)
            arrived += 1
        shown = _shown(queue, lengths, engine)
        if not shown:
            # All waiting prompts have their keys elsewhere.
            engine.free[0] = float(arrivals[arrived]) if arrived < len(lengths) else np.inf
            continue
        batches = planner.plan(shown, engine.ranks)
        seconds = np.array([planner.batch_seconds(batch) for batch in batches])
        end = engine.run(now, float(seconds.max()))
        passes.append(Pass(engine.number, now, end, seconds, batches, group))
        waiting = len(queue)
        for rank, chunk in ((rank, chunk) for rank, batch in enumerate(batches) for chunk in batch):
            queue[chunk.prompt].done, queue[chunk.prompt].place = chunk.stop, (engine.number, rank)
            if chunk.stop == lengths[chunk.prompt]:
                del queue[chunk.prompt]
                first_token[chunk.prompt] = end
        on_progress(waiting - len(queue))
    return PrefillRun(passes, first_token - arrivals, float(first_token.max() - arrivals[0]))


def capacity(lengths: NDArray[np.int64], planner: PrefillPlanner, ranks: int) -> float:
    """Prompts of these lengths per second that ``ranks`` could prefill in full passes without idling."""
    attention = planner.workload.attention_seconds(lengths, "forward").sum()
    full_passes = lengths.sum() / planner.token_budget
    linear = full_passes * planner.workload.linear_seconds(planner.token_budget, "forward")
    return float(ranks * len(lengths) / (attention + linear))


def _shown(queue: dict[int, _Waiting], lengths: NDArray[np.int64], engine: _Engine) -> list[Prompt]:
    """The oldest prompts that ``engine`` may run, because no other engine has started them."""
    eligible = ((n, w) for n, w in queue.items() if w.place is None or w.place[0] == engine.number)
    return [
        Prompt(n, int(lengths[n]), w.done, None if w.place is None else w.place[1], engine.passes - w.arrived_in)
        for n, w in islice(eligible, LOOK_AHEAD)
    ]
