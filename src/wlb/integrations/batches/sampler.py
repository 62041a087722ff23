"""A batch sampler with planned batches: each item is the list of documents of one micro-batch."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.integrations.batches.processes import Processes
from wlb.integrations.batches.steps import ItemsOfSteps, balanced_job, check_names, checked_lengths, loop_settings
from wlb.integrations.document_fields import marks_of_some
from wlb.job.planner import PlannedStep
from wlb.packing.plan import StepPlan
from wlb.runtime.steps import PlannedSteps, digest_of


class PlannedBatchSampler:
    """Lists of dataset indices, one for each micro-batch, in steps of equal work on every rank.

    Args:
        lengths: Tokens of every document of the data set, in its order.
        rank: The rank of this process among dp x cp; required if that is more than 1.
        epochs: Epochs of one pass, planned as one stream that trains every document once per epoch. None never ends.
        settings: Keywords of ``wlb.integrations.batches.balanced_job``. ``packed_batches`` explains the others.

    With a process group and dp x cp > 1, ``iter`` is a collective call in which the processes compare their settings.
    Raises ``UserError`` if it cannot plan. ``iter`` raises it if plans differ, if no process has some rank, and for a
    ``DataLoader`` with another number of documents or, with our collator, other lengths, and for one that Accelerate
    shards or accumulates.
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
        check_names(settings, PlannedBatchSampler)
        self.lengths = checked_lengths(lengths)
        self.processes = Processes(rank, dp, cp, group)
        self.job = balanced_job(self.lengths, context_window, micro_batches, dp=self.processes.dp, cp=cp, **settings)
        if (longest := self.lengths.max()) > (window := self.job.context_window):
            number = f"document {self.lengths.argmax()} has {longest} tokens"
            raise UserError(f"{number}, over context_window = {window}; raise the window, or cut such documents")
        if self.job.levels_steps:
            alike = "a batch sampler gives all processes equally many batches"
            raise UserError(f"{alike}; for own_lists use packed_batches")
        self.rank, self._epochs = rank, epochs
        self._dp_rank = (rank or 0) // self.job.layout.pool_size
        self._lengths: dict[int, int] = {}  # batches of a pass, by its first epoch
        self._state: dict[str, Any] | None = None  # to begin with
        self._batches = self._begun(None, 0)

    def __iter__(self) -> ItemsOfSteps[list[int]]:
        """One pass, from a loaded state on if there is one; after a finished pass, the next has the next epochs.

        Raises ``UserError`` after a pass that was broken off, because the new one would train its documents again.
        """
        marks = self._check_reader(sys._getframe(1).f_locals.get("self"))
        if self._batches.has_begun:
            if not self._batches.is_over:
                again = "call set_epoch for another pass, or load_state_dict(state_dict()) to go on"
                raise UserError(f"the last pass of this sampler ended early, and the next would repeat it; {again}")
            self._state = None
        self._batches = self._begun(self._state, self._first_epoch)
        begin = {"first epoch": self._first_epoch, "digest of tokens": digest_of(marks)}
        begin["state"] = digest_of(json.dumps(self._state, sort_keys=True))
        self.processes.agree(self._batches.steps.settings, begin, self.rank)
        if self.rank is None and self.processes.ranks > 1:
            raise UserError(f"dp x cp = {self.processes.ranks}, and rank is missing; give the rank of this process")
        return self._batches

    def __len__(self) -> int:
        """Batches of a pass, counted by planning it. Raises ``TypeError`` for a pass without end."""
        if self._epochs is None:
            raise TypeError("a sampler with epochs = None has no length")
        if (first := self._first_epoch) not in self._lengths:
            self._lengths = {first: sum(len(plan.ranks[0]) for plan in self.steps())}
        return self._lengths[first]

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass number ``epoch``, unless a state was loaded; training loops call this."""
        if self._state is None or self._batches.has_begun:
            self._state, self._batches = None, self._begun(None, epoch * (self._epochs or 0))

    def state_dict(self) -> dict[str, Any]:
        """The place of the last iterator, as JSON-serialisable data; torchdata's loader knows how far workers are."""
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next ``iter`` continue from ``state``. Raises ``UserError`` as ``PlannedSteps`` does."""
        self._batches, self._state = self._begun(state, 0), dict(state)

    def steps(self, state: Mapping[str, Any] | None = None) -> Iterator[StepPlan]:
        """The plans of this pass (the next if it is over), or after ``state``, without changing this sampler."""
        return (step.plan for step in self._begun(state, self._first_epoch).steps)

    @property
    def _first_epoch(self) -> int:
        """Of this pass, or of the next if this one is over."""
        begun: int = self._batches.steps.first_epoch
        return begun + (self._epochs or 0) * self._batches.is_over

    def _check_reader(self, reader: Any) -> list[int]:
        """Raise ``UserError`` if ``reader``, whose method calls ``iter``, would not train the plan.

        Returns marks of some of its documents, if it is a loader with our collator.
        """
        if type(reader).__name__ == "BatchSamplerShard":  # of accelerator.prepare
            raise UserError("Accelerate prepared the loader and hides where steps end; use balanced_steps of wlb")
        if (dataset := getattr(reader, "_dataset", None)) is not None:  # of the iterator of a DataLoader
            if hasattr(dataset, "__len__") and len(dataset) != len(self.lengths):
                other = f"the data set has {len(dataset)} documents and the sampler {len(self.lengths)} lengths"
                raise UserError(f"{other}; give the lengths of this data set")
            # Other collators may cut documents, or add to them.
            if type(reader._collate_fn).__name__ == "FlatteningCollator":
                return marks_of_some(dataset.__getitem__, self.lengths)
        return []

    def _begun(self, state: Mapping[str, Any] | None, first_epoch: int) -> ItemsOfSteps[list[int]]:
        known = loop_settings(self.job, self.lengths, epochs=self._epochs)
        steps = PlannedSteps(self.job, self.lengths, known, epochs=self._epochs, first_epoch=first_epoch)
        batches = ItemsOfSteps(steps, self._documents)
        if state is not None:
            batches.load_state_dict(state)
        return batches

    def _documents(self, step: PlannedStep) -> list[list[int]]:
        own = step.plan.ranks[self._dp_rank]
        return [[part.document % len(self.lengths) for part in micro_batch.segments] for micro_batch in own]
