"""A batch sampler whose batches are planned: every item is the list of documents of one micro-batch of a rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.integrations.batches.processes import Processes, check_accumulation
from wlb.integrations.batches.steps import ItemsOfSteps, WholeSteps, balanced_job, checked_lengths
from wlb.packing.plan import StepPlan
from wlb.runtime.own_lists import digest_of


class PlannedBatchSampler:
    """Lists of dataset indices, one for each micro-batch, in steps of equal work on every rank.

    Args:
        lengths: Tokens of every document of the data set, in its order.
        rank: The process whose micro-batches are wanted, of dp x cp; needed where that is more than 1.
        epochs: Epochs of one pass, planned as one stream: each trains every document once. None never ends.
        settings: Keywords of ``wlb.integrations.batches.balanced_job``. Others are those of ``packed_batches``.

    Where a process group is initialised and dp x cp > 1, ``iter`` is a collective call, and the processes compare what
    they begin a pass with. Raises ``UserError`` for documents and settings that cannot be planned; from ``iter``, on
    every process, where they would train different plans, or some rank's micro-batches not at all; and where a
    ``DataLoader`` has another number of documents, or is dealt or accumulated by Accelerate.
    """

    # What PyTorch, Accelerate and Lightning ask of a batch sampler whose batches differ in size.
    batch_size: int | None = None
    drop_last = True

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[np.integer[Any]],
        *,
        context_window: int,
        micro_batches: int,
        dp: int | None = None,
        cp: int = 1,
        rank: int | None = None,
        epochs: int | None = 1,
        group: Any = None,
        **settings: Any,
    ) -> None:
        self.lengths = checked_lengths(lengths)
        if (longest := self.lengths.max()) > context_window:
            number = f"document {self.lengths.argmax()} has {longest} tokens"
            raise UserError(f"{number}, over context_window = {context_window}; raise it, or cut such documents before")
        self.processes = Processes(rank, dp, cp, group)
        self.job = balanced_job(self.lengths, context_window, micro_batches, dp=self.processes.dp, cp=cp, **settings)
        if self.job.levels_steps:
            raise UserError("a batch sampler gives all processes equally many batches; own lists need packed_batches")
        self.rank, self._epochs, self._first_epoch = rank, epochs, 0
        self._dp_rank = (rank or 0) // self.job.layout.cp
        self._length: int | None = None
        self._state: dict[str, Any] | None = None
        self._batches = self._begun(None)

    def __iter__(self) -> ItemsOfSteps[list[int]]:
        """One pass, from a loaded state on if there is one; after a finished pass, the next has the next epochs."""
        self._check_reader(sys._getframe(1).f_locals.get("self"))
        if self._state is None and self._batches.finished:
            self._first_epoch, self._length = self._batches.steps.first_epoch + (self._epochs or 0), None
        self._batches = self._begun(self._state)
        begin = {"first epoch": self._first_epoch, "state": digest_of(json.dumps(self._state, sort_keys=True))}
        self.processes.agree(self._batches.steps.settings | begin, self.rank)
        if self.rank is None and self.processes.ranks > 1:
            raise UserError(f"dp x cp = {self.processes.ranks}, and rank is not given; give that of this process")
        self._state = None
        return self._batches

    def __len__(self) -> int:
        """Batches of a pass, known by planning it. Raises ``TypeError`` where it never ends."""
        if self._epochs is None:
            raise TypeError("a sampler with epochs = None has no length")
        if self._length is None:
            self._length = sum(len(plan.ranks[0]) for plan in self.steps())
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be number ``epoch``, unless a state says otherwise; loops call this by themselves."""
        if self._state is None:
            self._first_epoch, self._length = epoch * (self._epochs or 0), None
            self._batches = self._begun(None)

    def state_dict(self) -> dict[str, Any]:
        """Where the last iterator is, as JSON-serialisable data; torchdata's loader knows how far workers are ahead."""
        return self._batches.state_dict() if self._state is None else dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter`` continue from ``state``. Raises ``UserError`` as ``WholeSteps`` does."""
        self._first_epoch = self._begun(state).steps.first_epoch
        self._state, self._length = dict(state), None

    def steps(self, state: Mapping[str, Any] | None = None) -> Iterator[StepPlan]:
        """The plans of a pass, or those after ``state``, on which nothing here has an effect: for a monitor."""
        yield from self._begun(state).steps

    def _check_reader(self, reader: Any) -> None:
        """Raise ``UserError`` where ``reader``, whose method calls ``iter``, would not train what is planned."""
        if type(reader).__name__ == "BatchSamplerShard":  # of accelerator.prepare
            use = "use wlb.integrations.accelerate.balanced_steps(accelerator, model, documents, ...)"
            raise UserError(f"a loader that Accelerate prepares does not say where steps end; {use}")
        if (dataset := getattr(reader, "_dataset", None)) is not None:  # of the iterator of a DataLoader
            check_accumulation()
            if hasattr(dataset, "__len__") and len(dataset) != len(self.lengths):
                other = f"the loader's data set has {len(dataset)} documents and the sampler {len(self.lengths)}"
                raise UserError(f"{other} lengths; give those of this data set")

    def _begun(self, state: Mapping[str, Any] | None) -> ItemsOfSteps[list[int]]:
        steps = WholeSteps(self.job, self.lengths, epochs=self._epochs, first_epoch=self._first_epoch)
        batches = ItemsOfSteps(steps, self._documents)
        if state is not None:
            batches.load_state_dict(state)
        return batches

    def _documents(self, plan: StepPlan) -> list[list[int]]:
        own = plan.ranks[self._dp_rank]
        return [[part.document % len(self.lengths) for part in micro_batch.segments] for micro_batch in own]
