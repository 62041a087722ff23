"""The data loader: plans and tokens of the next steps, ready before training asks for them.

One thread plans, from lengths only. A second one shards the micro-batches of this data-parallel rank over its
context-parallel ranks, and reads this rank's tokens from the memory-mapped store. ``StepLoader`` returns
``LoadedStep``s; its state is that after the last step returned, whatever the threads have prepared.

The document order follows from the token store and some settings, the identity of a state. If one of them differs from
the checkpoint's, the job would repeat some documents and leave out others, so it is refused.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist

from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.job.config import TrainingConfig
from wlb.job.job import Job
from wlb.job.planner import PlannedStep, StepPlanner
from wlb.packing.plan import StepPlan
from wlb.runtime.batch import labelled_tokens, read_batch
from wlb.runtime.calibration import Calibration
from wlb.runtime.own_lists import digest_of, fingerprint_of, names_ranks
from wlb.runtime.sharded_batch import Batch, RankSlice

T = TypeVar("T")

_STEPS_AHEAD = 2  # planned ahead of training, and as many read


def share_in(job: Job, dp_rank: int, cp_rank: int, group: dist.ProcessGroup | None = None) -> RankSlice:
    """The share of a rank of ``job``, and its context-parallel ``group``."""
    return RankSlice(dp_rank, cp_rank, job.layout, job.sharding.strategy, job.costs, group)


@dataclass(frozen=True)
class LoadedStep:
    """One step, ready to train: ``batches`` are this rank's parts of its micro-batches, in pipeline order.

    The plan covers all ranks, but only this data-parallel rank has operations. ``loss_tokens`` counts the labelled
    tokens of all. Equal plans have equal ``fingerprint``s; equal operations and shard plans of all batches of a
    data-parallel rank have equal ``shard_fingerprint``s.
    Training waited ``wait_seconds`` for this step.
    """

    planned: PlannedStep
    batches: tuple[Batch, ...]
    loss_tokens: int
    fingerprint: int
    shard_fingerprint: int
    wait_seconds: float = 0.0

    @property
    def plan(self) -> StepPlan:
        return self.planned.plan


class StepLoader(Iterator[LoadedStep]):
    """Iterates over the steps of ``job`` for the rank that trains ``share`` of each, from ``state`` if given.

    It ends after one epoch if ``training.steps`` is unset, and never otherwise. Close it, or use it as a context
    manager. Plans use the prices that ``calibration`` measured, which are part of the state. Raises ``UserError`` if
    ``state`` was saved with other data or settings. Failures of the threads surface in ``next``.
    """

    def __init__(
        self,
        store: TokenStore,
        job: Job,
        training: TrainingConfig,
        *,
        share: RankSlice | None = None,
        state: dict[str, Any] | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self._store, self._job, self._calibration = store, job, calibration
        self._share = share or RankSlice()
        self._identity = data_identity(store, job)
        self._epochs = 1 if training.steps is None else None
        if state is not None:
            check_identity(state, store, job)
            if calibration is not None and "calibration" in state:
                calibration.load_state_dict(state["calibration"])
        self._begin(None if state is None else state["planner"])

    def plan_again(self) -> None:
        """Plan again from the last step returned on, with the prices calibrated since; drop steps planned ahead."""
        self.close()
        self._begin(self._state)

    def _begin(self, state: dict[str, Any] | None) -> None:
        job = self._job
        if self._calibration is not None:
            job = job.measured(self._calibration.prices, self._calibration.speeds)
        planner = StepPlanner(job, self._store.stored_lengths, epochs=self._epochs, pipeline=self._share.dp_rank)
        if state is not None:
            planner.load_state_dict(state)
        self._state = planner.state_dict()
        self._pending_documents = planner.pending_documents
        self._threads = [ThreadPoolExecutor(1, f"wlb-{work}") for work in ("planning", "reading")]
        planning, reading = self._threads
        self._steps = _ahead(map(self._read, _ahead(planner, planning)), reading)

    def __next__(self) -> LoadedStep:
        started = time.perf_counter()
        step = next(self._steps)
        self._state = step.planned.state
        self._pending_documents = step.planned.pending_documents
        return replace(step, wait_seconds=time.perf_counter() - started)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue after the last step returned; JSON-serialisable."""
        found = {} if self._calibration is None else {"calibration": self._calibration.state_dict()}
        return {"identity": self._identity, "planner": self._state, **found}

    def totals(self) -> dict[str, Any]:
        """What became of the documents read, from the job's first step to the last one returned.

        ``overlong`` has the fields of ``OverlongReport``; ``pending_documents`` are not wholly trained.
        """
        return {"overlong": self._state["stream"]["overlong"], "pending_documents": self._pending_documents}

    def close(self) -> None:
        """End the threads; safe to call twice."""
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, planned: PlannedStep) -> LoadedStep:
        plan = planned.plan
        loss_tokens = labelled_tokens(plan, self._store)
        # Last, because this notices if a file changed before it was read to the end.
        batches = self._share.batches(plan, lambda part: read_batch(part, self._store, self._job.shape.vocab_size))
        # If micro-batches name their ranks, ranks have different ones. Equal plans give equal shards, because shards
        # follow from whole lengths, without prices, which two machines may round differently.
        shared = [] if names_ranks(plan) else [batch.attend.shard_plan for batch in batches if batch.attend]
        shards = [[table.tolist() for table in shard_plan.pieces] for shard_plan in shared]
        return LoadedStep(planned, batches, loss_tokens, fingerprint_of(plan), digest_of((shards, plan.operations)))


def data_identity(store: TokenStore, job: Job) -> dict[str, Any]:
    """What a loader state is valid for: the data, and every setting that decides which document trains when.

    Parallel sizes, micro-batches, their assignment to ranks, the model, and what the packer does not read may change.
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
    """Raise ``UserError`` if ``state`` is not valid for the identity of ``store`` and ``job``."""
    saved, current = state["identity"], data_identity(store, job)
    changed = [name for name, value in current.items() if saved.get(name) != value]
    if changed:
        name, *others = changed
        more = f" ({len(others)} more settings differ)" if others else ""
        raise UserError(
            f"the checkpoint was written with {name} = {saved.get(name)!r}, but this job has {current[name]!r}{more}; "
            "go back to the old setting, or start anew with another checkpoint.dir"
        )


def _ahead(source: Iterator[T], thread: ThreadPoolExecutor) -> Iterator[T]:
    """``source``, computed ahead of its consumer in ``thread``, which has no other work."""
    end = object()
    coming: deque[Future[Any]] = deque(thread.submit(next, source, end) for _ in range(_STEPS_AHEAD))
    while (item := coming.popleft().result()) is not end:
        coming.append(thread.submit(next, source, end))
        yield item
