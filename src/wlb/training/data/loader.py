"""The data loader: plans and tokens of the next steps, ready before training asks for them.

One thread plans (lengths only, the same on every rank), a second shards the micro-batches of this data-parallel rank
over its context-parallel ranks and reads this one's tokens from the memory-mapped store. ``StepLoader`` hands out
``LoadedStep``s; its state belongs to the last step handed out, whatever the threads have prepared beyond it.

The order in which documents train follows from the token store and some settings: the identity of a state. Where one of
them differs from what a checkpoint was written with, continuing would repeat some documents and leave out others, so it
is refused.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.job.config import TrainingConfig
from wlb.job.job import Job
from wlb.job.planner import PlannedStep, StepPlanner
from wlb.job.prices import LEVEL_SHARDING
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.runtime.batch import TokenBatch, labelled_tokens, read_batch
from wlb.runtime.sharded_batch import ShardedBatch, shard_batch
from wlb.schedules.layout import Layout
from wlb.sharding import make_shard_plan
from wlb.training.data.prefetch import Prefetcher, Shutdown
from wlb.workload import Costs


@dataclass(frozen=True)
class RankShare:
    """Which part of a step a rank trains, and how the others of its context-parallel group share it with it.

    ``workload`` prices shards: that of one GPU without context parallelism. Pipeline ranks with the same dp and cp
    rank, and all tensor-parallel ranks, have the same share.
    """

    dp_rank: int = 0
    cp_rank: int = 0
    layout: Layout = field(default_factory=Layout)
    strategy: str = "hybrid"
    workload: Costs | None = None

    @classmethod
    def in_job(cls, job: Job, dp_rank: int, cp_rank: int) -> RankShare:
        """The share of a rank of ``job``."""
        return cls(dp_rank, cp_rank, job.layout, job.sharding.strategy, job.costs)

    def of(self, batch: TokenBatch, ranks: tuple[int, ...] = ()) -> ShardedBatch:
        """What this rank holds of ``batch``, which the context-parallel ``ranks`` run; all where none are named."""
        strategy, workload = (LEVEL_SHARDING, None) if ranks else (self.strategy, self.workload)
        plan = make_shard_plan(batch.segment_lengths, len(ranks) or self.layout.cp, strategy, workload=workload)
        rank = ranks.index(self.cp_rank) if ranks else self.cp_rank
        return shard_batch(batch, plan, rank, self.layout.tp, ranks)

    def batches(self, plan: StepPlan, read: Callable[[MicroBatch], TokenBatch]) -> tuple[ShardedBatch, ...]:
        """What this rank holds of its micro-batches of ``plan``, of which it reads no others.

        Where they name their ranks, one without tokens may follow. In the backward of its last micro-batch a rank
        reduces gradients, layer by layer, and waits there for all others; so no other may still need it for a later
        one. Its last has to be the last of all that share it.
        """
        mine = [plan.ranks[self.dp_rank][index] for index in micro_batches_of(plan, self.dp_rank, self.cp_rank)]
        if names_ranks(plan):
            last = {rank: part for part in plan.ranks[self.dp_rank] for rank in part.ranks}
            if not mine or any(last[rank] is not mine[-1] for rank in mine[-1].ranks):
                mine.append(MicroBatch((), 0.0, (self.cp_rank,)))
        return tuple(self.of(read(micro_batch), micro_batch.ranks) for micro_batch in mine)


@dataclass(frozen=True)
class LoadedStep:
    """One step, ready to train: ``batches`` are this rank's shares of its micro-batches, in pipeline order.

    The plan covers all ranks and ``loss_tokens`` counts their labelled tokens. ``fingerprint`` is equal where plans are
    equal, ``shard_fingerprint`` where the shard plans of all batches of a data-parallel rank are. ``wait_seconds`` is
    how long training stood still for this step.
    """

    planned: PlannedStep
    batches: tuple[ShardedBatch, ...]
    loss_tokens: int
    fingerprint: int
    shard_fingerprint: int
    wait_seconds: float = 0.0

    @property
    def plan(self) -> StepPlan:
        return self.planned.plan


class StepLoader(Iterator[LoadedStep]):
    """Iterates over the steps of ``job`` for the rank that trains ``share`` of each, from ``state`` if given.

    Ends after one epoch if ``training.steps`` is unset and never otherwise. Close it, or use it as a context manager.
    Raises ``UserError`` if ``state`` was saved on other data or settings. Failures of the threads surface in ``next``.
    """

    def __init__(
        self,
        store: TokenStore,
        job: Job,
        training: TrainingConfig,
        *,
        share: RankShare | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._store = store
        self._vocab_size = job.shape.vocab_size
        self._share = share or RankShare()
        self._identity = data_identity(store, job)
        epochs = 1 if training.steps is None else None
        lengths = store.stored_lengths
        planner = StepPlanner(job, lengths, epochs=epochs)
        if state is not None:
            check_identity(state, store, job)
            planner.load_state_dict(state["planner"])
        self._state = planner.state_dict()
        self._pending_documents = planner.pending_documents
        self._shutdown = Shutdown()
        depth = training.prefetch
        self._plans = Prefetcher(planner, depth, "wlb-planning", self._shutdown)
        self._steps = Prefetcher(map(self._read, self._plans), depth, "wlb-reading", self._shutdown)

    def __next__(self) -> LoadedStep:
        started = time.perf_counter()
        step = next(self._steps)
        self._state = step.planned.state
        self._pending_documents = step.planned.pending_documents
        return replace(step, wait_seconds=time.perf_counter() - started)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue with the step after the last one handed out; JSON-serialisable."""
        return {"identity": self._identity, "planner": self._state}

    def totals(self) -> dict[str, Any]:
        """What became of the documents taken in, from the job's first step to the last one handed out.

        ``overlong`` has the fields of ``OverlongReport``; of ``pending_documents`` a part still waits.
        """
        return {"overlong": self._state["stream"]["overlong"], "pending_documents": self._pending_documents}

    def close(self) -> None:
        """End the threads; safe to call twice."""
        self._shutdown.close()
        self._plans.join()
        self._steps.join()

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batch(self, micro_batch: MicroBatch) -> TokenBatch:
        return read_batch(micro_batch, self._store, self._vocab_size)

    def _read(self, planned: PlannedStep) -> LoadedStep:
        plan = planned.plan
        loss_tokens = labelled_tokens(plan, self._store)
        # Last, as this notices where a file was changed before it was read to the end.
        batches = self._share.batches(plan, self._batch)
        shards = [] if names_ranks(plan) else [[table.tolist() for table in b.shard_plan.pieces] for b in batches]
        return LoadedStep(
            planned=planned,
            batches=batches,
            loss_tokens=loss_tokens,
            fingerprint=_fingerprint((plan.step, [[(part.segments, part.ranks) for part in r] for r in plan.ranks])),
            # Where micro-batches name their ranks, these have different ones. All cut them alike where the plans are
            # equal: by whole numbers that follow from lengths, without prices, which two machines may round apart.
            shard_fingerprint=_fingerprint(shards),
        )


def names_ranks(plan: StepPlan) -> bool:
    """Whether micro-batches of ``plan`` say which context-parallel ranks run them."""
    return any(micro_batch.ranks for micro_batch in plan.micro_batches)


def micro_batches_of(plan: StepPlan, dp_rank: int, cp_rank: int) -> list[int]:
    """Which micro-batches of data-parallel rank ``dp_rank`` are run by its context-parallel rank ``cp_rank``."""
    ranks = [micro_batch.ranks for micro_batch in plan.ranks[dp_rank]]
    return [index for index, named in enumerate(ranks) if not named or cp_rank in named]


def data_identity(store: TokenStore, job: Job) -> dict[str, Any]:
    """What a loader state is valid for: the data, and every setting that decides which document trains when.

    Parallel sizes, micro-batches, the model, the dealing of micro-batches to ranks and settings that the packing method
    has no use for are absent: they may change.
    """
    data = job.data.model_dump(mode="json", exclude={"store", "mixture"})
    if job.data.mixture:
        data["weights"] = list(job.data.weights)
    packing = {"method": job.packing.method, **job.packing.identity(job.context_window)}
    return {
        "token store": store.identity,
        "tokenizer": store.tokenizer_identity,
        **{f"data.{key}": value for key, value in data.items()},
        **{f"packing.{key}": value for key, value in packing.items()},
    }


def check_identity(state: dict[str, Any], store: TokenStore, job: Job) -> None:
    """Raise ``UserError`` where the identity of ``store`` and ``job`` is not what loader ``state`` is valid for."""
    saved, current = state["identity"], data_identity(store, job)
    changed = [name for name, value in current.items() if saved.get(name) != value]
    if changed:
        name, *others = changed
        more = f" ({len(others)} more settings differ)" if others else ""
        raise UserError(
            f"the checkpoint was written with {name} = {saved.get(name)!r}, this job has {current[name]!r}{more}; "
            "resume with what it was written with, or start anew with another checkpoint.dir"
        )


def _fingerprint(layout: object) -> int:
    digest = hashlib.sha256(repr(layout).encode()).digest()
    return int.from_bytes(digest[:7], "little")  # 56 bits fit an int64
