"""One job as the trainer sees it and as the simulator sees it, from the same configuration and documents.

Each side answers with the functions that really run: those of a rank, without its processes, and the simulation's.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from wlb.documents.order import check_trainable
from wlb.documents.store.reader import TokenStore, TokenStoreWriter
from wlb.errors import UserError
from wlb.integrations.batches import PlannedBatchSampler
from wlb.job.config import JobConfig
from wlb.job.job import NCCL_BYTES, USABLE_SHARE, Job
from wlb.job.memory.fit import fits, predicted_memory
from wlb.job.planner import StepPlanner
from wlb.packing.plan import StepPlan
from wlb.runtime.batch import Batch, RankSlice
from wlb.runtime.steps import RankStep
from wlb.sharding import ShardPlan, make_shard_plan
from wlb.simulate import simulate
from wlb.simulate.costs import JobCosts
from wlb.simulate.decide import decide
from wlb.training.dry_run import find_problems
from wlb.training.environment import trained_model
from wlb.training.preflight import check_job
from wlb.training.steps import open_steps

STEPS = 50
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Documents:
    """The part of a token store that planning and loading need; every token is 0."""

    lengths: NDArray[np.int64]
    vocab_size: int | None
    prefix: Path = Path("documents")
    identity: str = "documents"
    tokenizer_identity: str = "none"

    @property
    def stored_lengths(self) -> NDArray[np.int64]:
        return self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def lengths_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.lengths[documents]

    def loss_mask(self, document: int, start: int, length: int) -> None:
        """Every token is a label."""

    def check_unchanged(self, documents: NDArray[np.int64]) -> None:
        """There is no file."""

    def read(self, document: int, start: int = 0, length: int | None = None) -> NDArray[np.uint16]:
        return np.zeros(int(self.lengths[document]) - start if length is None else length, np.uint16)


@dataclass(frozen=True, repr=False)
class Case:
    """A job: its configuration, its documents, and the preset of the GPUs that it runs on."""

    config: JobConfig
    documents: Documents
    hardware: str = "h100"

    def __repr__(self) -> str:
        given = self.config.model_dump(mode="json", exclude_unset=True)
        return f"Case({given}, lengths={self.documents.lengths.tolist()}, {self.documents.vocab_size}, {self.hardware})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would print every default of the configuration

    @property
    def store(self) -> TokenStore:
        return cast(TokenStore, self.documents)


@dataclass(frozen=True)
class Refusal:
    """What a user is told who asks for something impossible; two are equal whatever they say."""

    message: str = field(compare=False)


def outcome(ask: Callable[[Case], T], case: Case) -> T | Refusal:
    try:
        return ask(case)
    except UserError as error:
        return Refusal(str(error))


# The trainer


def trained_job(case: Case) -> Job:
    vocabulary = trained_model(case.config, case.store).shape.vocab_size
    return Job.from_config(case.config, case.hardware, vocab_size=vocabulary)


def _decided(case: Case) -> Job:
    """The job without "auto", as a machine with such GPUs decides; what does not fit is not refused."""
    return decide(trained_job(case), case.documents.lengths)


def _loaded(case: Case, dp_rank: int) -> list[RankStep[Batch]]:
    check_trainable(case.documents.lengths, case.config.data)
    job = _decided(case)
    share = RankSlice(dp_rank, 0, job.layout, job.sharding.strategy, job.costs)
    with closing(open_steps(case.store, job, case.config.training, share=share)) as loader:
        return [*islice(loader, STEPS)]


def listed(plan: ShardPlan) -> tuple[Any, ...]:
    """Everything that ``plan`` says, in what compares."""
    return plan.strategy, plan.segment_lengths, plan.earlier, [table.tolist() for table in plan.pieces]


def trained_shards(case: Case) -> list[tuple[Any, ...]]:
    """Of the last data-parallel rank's micro-batches that hold documents, step after step.

    None of level steps, in which every rank has micro-batches of its own (``tests/training/test_equivalence.py``).
    """
    if _decided(case).levels_steps:
        return []
    rank = _decided(case).layout.pools - 1
    steps = _loaded(case, rank)
    batches = [pair for step in steps for pair in zip(step.batches, step.plan.ranks[rank], strict=True)]
    return [listed(batch.attention.shard_plan) for batch, part in batches if part.segments and batch.attention]


# The simulator


def undecided(case: Case) -> Job:
    return Job.from_config(case.config, case.hardware, vocab_size=case.documents.vocab_size)


def simulated_job(case: Case) -> Job:
    return decide(undecided(case), case.documents.lengths)


def simulated_plans(case: Case) -> list[StepPlan]:
    return [*islice(StepPlanner(simulated_job(case), case.documents.lengths).plans(), STEPS)]


def simulated_shards(case: Case) -> list[tuple[Any, ...]]:
    """As ``trained_shards``; tests/sharding/test_pieces.py prices these."""
    job = simulated_job(case)
    if job.levels_steps:
        return []
    layout, strategy, costs = job.layout, job.sharding.strategy, JobCosts(job).rank
    parts = [part for plan in simulated_plans(case) for part in plan.ranks[-1] if part.segments]
    earlier = [part.earlier if part.is_slice else None for part in parts]
    return [
        listed(make_shard_plan(part.lengths, layout.pool_size, strategy, workload=costs, earlier=before))
        for part, before in zip(parts, earlier, strict=True)
    ]


# What is decided before a job starts


class Decided(NamedTuple):
    """What a job leaves open and what it runs in the end; equal for all who describe the same job."""

    layout: tuple[object, ...]  # tp, size of pools, pp, number of pools, virtual_pp, schedule
    packing: dict[str, Any]  # micro-batches, L_max, grouping, global batch and every other option
    max_tokens: int
    memory_bytes: int


def decided(job: Job) -> Decided:
    layout = job.layout
    sizes = (layout.tp, layout.pool_size, layout.pp, layout.pools, layout.virtual_pp, layout.schedule)
    return Decided(sizes, job.packing.in_use(), job.max_tokens, predicted_memory(job).total)


def stored(case: Case, folder: Path) -> Case:
    """The same case with a token store in ``folder``."""
    store = folder / "store"
    with TokenStoreWriter(store, vocab_size=case.documents.vocab_size or 1) as writer:
        for length in case.documents.lengths:
            writer.add(np.zeros(length, np.int64))
    metrics = {"dir": str(folder / "metrics"), "tensorboard": False}
    given = case.config.model_dump(exclude_unset=True) | {"metrics": metrics}
    given["data"]["store"] = str(store)
    return replace(case, config=JobConfig.model_validate(given))


def decided_by_trainer(case: Case) -> Decided:
    return decided(check_job(case.config, case.config.parallel.layout.world_size).job)


def decided_by_dry_run(case: Case) -> Decided:
    found, problems = find_problems(case.config, case.hardware)
    if problems:
        raise UserError(problems[0])
    return decided(found.job)


def decided_by_simulator(case: Case) -> Decided:
    job = simulate(undecided(case), case.documents.lengths, 1).job
    return decided(_fitting(job))


def decided_in_lock_step(case: Case) -> Decided:
    """What loops run in which ranks cannot have micro-batches of their own."""
    return decided(_fitting(decide(undecided(case), case.documents.lengths, lock_step=True)))


def decided_by_batches(case: Case) -> Decided:
    """Of a case without pipeline and tensor parallelism, of the order that loops which run in lock-step have."""
    config, job = case.config, trained_job(case)
    parallel, packing = config.parallel, config.packing.model_dump(exclude_unset=True)
    if config.preset == "balanced":
        packing = {"grouping": "auto", "max_length_factor": "auto"} | packing
    memory = (config.training.memory_gib or 1.0) * 2**30 + NCCL_BYTES * (job.hardware.device_type == "cuda")
    sampler = PlannedBatchSampler(
        case.documents.lengths,
        context_window=config.data.context_window,
        micro_batches=max(1, config.packing.global_batch // parallel.dp),
        dp=parallel.dp,
        cp=parallel.cp,
        pool=parallel.pool,
        rank=0,
        model=job.shape,
        hardware=replace(job.hardware, memory_bytes=memory / USABLE_SHARE),
        preset=config.preset,
        seed=config.data.seed,
        shuffle=config.data.shuffle,
        **packing,
    )
    return decided(_fitting(sampler.job))


def _fitting(job: Job) -> Job:
    """Raises ``UserError`` for a job that the trainer refuses, which is simulated all the same."""
    if not fits(job):
        raise UserError("it does not fit")
    return job


def case_of_job(job: Job, model: str, lengths: NDArray[np.int64]) -> Case:
    """What a user sets to train ``job``: its layout without pools."""
    packing = {name: value for name, value in job.packing.in_use().items() if value is not None}
    undecided = {"max_length_factor": "auto", "grouping": "auto", "rank_micro_batches": "auto"}
    packing |= undecided if job.packing.is_balanced else {}
    layout = {
        "dp": job.layout.dp,
        "cp": job.layout.cp,
        "tp": job.layout.tp,
        "pp": job.layout.pp,
        "virtual_pp": job.layout.virtual_pp,
        "schedule": job.layout.schedule,
    }
    config = {
        "model": {"name": model},
        "data": {"store": "documents", "context_window": job.context_window},
        "parallel": layout,
        "packing": packing,
        "sharding": job.sharding,
        "training": {"activation_checkpointing": job.activation_checkpointing, "device": "cuda"},
    }
    return Case(JobConfig.model_validate(config), Documents(lengths, job.shape.vocab_size))
