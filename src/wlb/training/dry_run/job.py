"""The dry run of a job: what its ranks hold and send, beside what the memory model and the simulator predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from wlb.documents.lengths import read_lengths
from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.job.job import Job
from wlb.job.memory.fit import predicted_memory
from wlb.job.memory.layers import Exchange
from wlb.job.memory.step import predict_rank_memory
from wlb.job.planner import StepPlanner
from wlb.packing.plan import StepPlan
from wlb.sharding.latency import Shards
from wlb.simulate.estimate import CONFIGURED, judge_config
from wlb.simulate.level import LevelSteps
from wlb.simulate.rate import simulate_step
from wlb.simulate.step import Steps
from wlb.simulate.verdict import Verdict
from wlb.training.data.loader import micro_batches_of
from wlb.training.dry_run.meter import ACTIVATIONS, BATCHES, EXCHANGE, GATHERED, GRADIENTS, OPTIMIZER, WEIGHTS
from wlb.training.dry_run.problems import FoundJob, find_problems
from wlb.training.dry_run.rank import Place, RankRun, run_ranks
from wlb.training.dry_run.traffic import PURPOSES, received_bytes
from wlb.training.parallel.mesh import mesh_shape

_LOOK_AHEAD = 4  # steps to choose from: a job's first have few long documents where packing lets those wait

# What is shown, of what is counted in a step and of what the memory model says.
KINDS = {
    "parameters": ({WEIGHTS, GATHERED}, {"weights", "gathered weights"}),
    "gradients": ({GRADIENTS}, {"gradients"}),
    "optimizer": ({OPTIMIZER}, {"optimizer"}),
    "activations": ({ACTIVATIONS, BATCHES}, {"activations", "scores", "batches", "working"}),
    "exchange": ({EXCHANGE}, {"received keys and values"}),
}


class Compared(NamedTuple):
    """What a dry run counted, and what was predicted; None where nothing is."""

    run: int
    predicted: int | None

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to the run."""
        return self.predicted / self.run - 1 if self.predicted is not None and self.run else None


@dataclass(frozen=True)
class RankReport:
    """A rank's step; ``memory`` in bytes by ``KINDS``, ``traffic`` in bytes received by purpose."""

    run: RankRun
    role: str
    memory: dict[str, Compared]
    traffic: dict[str, Compared]

    @property
    def total(self) -> Compared:
        return Compared(
            sum(kind.run for kind in self.memory.values()), sum(kind.predicted or 0 for kind in self.memory.values())
        )

    def to_json(self, sizes: Sequence[int]) -> dict[str, Any]:
        calls = Counter(call.purpose for call in self.run.calls[-1])
        groups = {call.purpose: call.members for call in self.run.calls[-1]}
        return {
            "rank": self.run.rank,
            "role": self.role,
            "place": self.run.place._asdict(),
            "seconds": self.run.seconds,
            "operators": self.run.operators,
            "memory_bytes": self.total._asdict(),
            "memory": {kind: compared._asdict() for kind, compared in self.memory.items()},
            "traffic": {
                purpose: {
                    "group": _dimensions(groups[purpose], sizes),
                    "ranks": len(groups[purpose]),
                    "calls": calls[purpose],
                    **compared._asdict(),
                }
                for purpose, compared in self.traffic.items()
            },
        }


@dataclass(frozen=True)
class DryRun:
    """What is known of a job before it runs: problems at its start, the plan of a step, and some of its ranks in it.

    ``step`` counts from 1.
    """

    found: FoundJob
    step: int
    plan: StepPlan
    simulated: Steps | LevelSteps
    ranks: tuple[RankReport, ...]
    verdict: Verdict | None  # beside plain-4d; None without a token store that fills a step

    def to_json(self) -> dict[str, Any]:
        job = self.found.job
        return {
            "gpus": job.layout.world_size,
            "layout": job.sizes,
            "hardware": self.found.hardware,
            "data": "synthetic" if self.found.synthetic else "store",
            "problems": list(self.found.problems),
            "step": self.step,
            "step_tokens": self.plan.tokens,
            "imbalance": self.imbalance,
            "speed_at_equal_work": None if self.verdict is None else self.verdict.speed(CONFIGURED),
            "memory_limit_bytes": int(job.memory_limit.number_of_bytes),
            "worst_step_bytes": predicted_memory(job).total,
            "ranks": [rank.to_json(mesh_shape(job.layout)) for rank in self.ranks],
        }

    @property
    def imbalance(self) -> dict[str, float]:
        """Slowest over mean, in predicted seconds: of micro-batches, and of GPUs over the step."""
        return {name: float(self.simulated.imbalance[name][0]) for name in ("micro_batches", "gpus")}


def dry_run(config: JobConfig, ranks: int | Literal["all"] = 0, hardware: str = "h100") -> DryRun:
    """Try ``config`` on GPUs (or CPUs) of ``hardware`` as one rank, or as one of every kind of rank.

    Of the job's first steps, the one is run in which ranks exchange the most keys and values. Raises ``UserError`` for
    a rank that the job has not, and where no step of it can be planned.
    """
    found = find_problems(config, hardware)
    job = found.job
    size = job.layout.world_size
    if ranks != "all" and not 0 <= ranks < size:
        raise UserError(f"rank {ranks} is not in a job of {size} ranks; give one from 0 to {size - 1}")
    step, plan, shards = _heaviest_step(found)
    roles = distinct_roles(job, shards) if ranks == "all" else {ranks: "as asked"}
    runs = run_ranks(found, list(roles), [step])
    reports = tuple(_report(run, roles[run.rank], found, plan, shards) for run in runs)
    return DryRun(found, step, plan, simulate_step(plan, job), reports, _judged(found))


def _judged(found: FoundJob) -> Verdict | None:
    """What ``wlb simulate`` says of the job."""
    if found.synthetic:
        return None
    lengths = [read_lengths(store, keep_empty=True) for store in found.config.data.stores]
    job = Job.from_config(found.config, found.hardware, vocab_size=found.model.shape.vocab_size)
    try:
        return judge_config(found.config, job, lengths[0] if len(lengths) == 1 else lengths)
    except UserError:  # the documents do not fill a step
        return None


def _heaviest_step(found: FoundJob) -> tuple[int, StepPlan, Shards]:
    """Of the first steps, the one with the most exchanged and then the most tokens; its number, from 1."""
    steps = min(_LOOK_AHEAD, found.config.training.steps or _LOOK_AHEAD)
    planner = StepPlanner(
        found.job, found.store.stored_lengths, epochs=1 if found.config.training.steps is None else None
    )
    plans = [planned.plan for planned in islice(planner, steps)]
    choices = [(step, plan, _shards(plan, found.job)) for step, plan in enumerate(plans, 1)]
    return max(choices, key=lambda choice: (int(choice[2].received.sum()), choice[1].tokens))


def distinct_roles(job: Job, shards: Shards) -> dict[int, str]:
    """Ranks that differ in what they do, by what they are. Tensor-parallel ranks are alike.

    These are the first, a middle and the last pipeline rank with the largest share of the step's tokens; and with the
    smallest, and with the most received keys, the first of them: what a share changes, it changes on all alike.
    ``shards`` have shape (dp, micro-batches of a rank, cp).
    """
    pp, cp = job.layout.pp, job.layout.cp
    pipeline = {0: "first stage", pp - 1: "last stage"} | ({pp // 2: "middle stage"} if pp > 2 else {})
    if pp == 1:
        pipeline = {0: "all stages"}
    tokens, received = shards.tokens.sum(axis=1), shards.received.sum(axis=1)
    shares = {int(tokens.argmin()): "fewest tokens"}
    if received.any():
        shares[int(received.argmax())] = "most received"
    largest = int(tokens.argmax())
    shares[largest] = "most tokens"
    return {
        rank_at(job, Place(rank, share // cp, share % cp, 0)): f"{stage}, {amount}"
        for rank, stage in sorted(pipeline.items())
        for share, amount in shares.items()
        if rank == 0 or share == largest
    }


def rank_at(job: Job, place: Place) -> int:
    """The global rank at ``place``: tensor-parallel ranks are next to each other."""
    return int(np.ravel_multi_index(place, mesh_shape(job.layout)))


def _dimensions(members: Sequence[int], sizes: Sequence[int]) -> str:
    """The dimensions of the mesh in which ``members`` differ."""
    places = np.stack(np.unravel_index(members, sizes))
    return " x ".join(name for name, of_one in zip(Place._fields, places, strict=True) if len(set(of_one)) > 1)


def _shards(plan: StepPlan, job: Job) -> Shards:
    """Of all ranks, in the shape (dp, micro-batches, cp); nothing of a micro-batch that a rank does not run."""
    return simulate_step(plan, job).shards.map(lambda column: column[0])


def _report(run: RankRun, role: str, found: FoundJob, plan: StepPlan, shards: Shards) -> RankReport:
    job, (pp, dp, cp, _) = found.job, run.place
    mine = micro_batches_of(plan, dp, cp)
    without_tokens = (0, len(run.rows) - len(mine))  # one that may follow
    received, sent = (np.pad(column[dp, mine, cp], without_tokens) for column in (shards.received, shards.sent))
    kept = np.pad(shards.kept[dp, mine], without_tokens).astype(np.bool_)
    full = job.activation_checkpointing == "full"
    exchanges = [
        Exchange(int(tokens) if keeps else 0, int(max(tokens, out)))
        for tokens, out, keeps in zip(received, sent, kept, strict=True)
    ]
    estimate = predict_rank_memory(job, run.rows, pp, exchanges).parts
    memory = {
        kind: Compared(
            sum(run.memory.get(name, 0) for name in counted), sum(estimate.get(name, 0) for name in predicted)
        )
        for kind, (counted, predicted) in KINDS.items()
    }
    keys = np.stack([received, received * (full | ~kept), sent], axis=1)
    predicted = received_bytes(job, found.model, pp, run.rows, keys)
    happened = Counter[str]()
    for call in run.calls[-1]:
        happened[call.purpose] += call.received
    seen = {call.purpose for call in run.calls[-1]}
    traffic = {name: Compared(happened[name], predicted.get(name)) for name in PURPOSES if name in seen}
    return RankReport(run, role, memory, traffic)
