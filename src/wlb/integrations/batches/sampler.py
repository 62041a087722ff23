"""A batch sampler whose batches are planned: every item is the list of documents of one micro-batch.

It goes into any ``DataLoader(dataset, batch_sampler=...)``. With ``rank`` it yields the micro-batches of one
data-parallel rank; without, those of all processes in turn (rank 0's first, rank 1's first, ..., rank 0's second, ...),
which is how Accelerate's ``BatchSamplerShard`` deals batches to processes and what it deals back unchanged.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.errors import UserError
from wlb.integrations.batches.processes import Processes, check_accumulation, digest
from wlb.integrations.batches.steps import ItemsOfSteps, Lengths, WholeSteps, balanced_job, checked_lengths
from wlb.job.job import Job
from wlb.packing.plan import StepPlan
from wlb.workload.base import DocumentPrices

_COMPARED = 16  # documents of a loader's data set whose lengths are compared with those planned by


class PlannedBatchSampler:
    """Lists of dataset indices, one for each micro-batch, in steps of equal work on every rank.

    Args:
        lengths: Tokens of every document of the data set, in its order.
        context_window: Tokens of a micro-batch on average, and at most of a document. A micro-batch holds up to L_max,
            ``max_length_factor`` = 1.5 windows unless given.
        micro_batches: Of a step on each data-parallel rank: the loop's gradient accumulation.
        dp: Data-parallel ranks; by default those of the process group (its processes over cp), or 1 without one.
        cp: Context-parallel ranks of each, which train the same micro-batches.
        rank: The process whose micro-batches are wanted, of dp x cp (context-parallel ranks are neighbours); None for
            those of all in turn.
        epochs: Epochs of one pass, planned as one stream: each trains every document once. None never ends.
        workload: Prices of documents; by default those of ``model`` on ``hardware``.
        group: The ``torch.distributed`` group of all processes that train; None is the default group.
        settings: Further keywords of ``wlb.integrations.batches.balanced_job``: model, hardware, preset, seed, shuffle
            and options of the packer.

    Where a process group is initialised and dp x cp > 1, ``iter`` is a collective call: the processes compare the
    lengths, settings, state and ranks that they begin a pass with.

    Raises:
        UserError: A document is empty or over the context window, or settings that no job could have; from ``iter``, on
            every process, where they would train different plans, or some rank's micro-batches not at all, as where
            Accelerate prepares the loader of one ``rank``; and where a loader reads another data set than ``lengths``
            are of, or Accelerate accumulates gradients.
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
        workload: DocumentPrices | None = None,
        group: Any = None,
        **settings: Any,
    ) -> None:
        self._lengths = checked_lengths(lengths, context_window)
        if epochs is not None and epochs < 1:
            raise UserError(f"epochs must be >= 1, or None for no end; got {epochs}")
        self._group = Processes(rank, dp, cp, group)
        self.job: Job = balanced_job(
            self._lengths, context_window, micro_batches, dp=self._group.dp, cp=cp, workload=workload, **settings
        )
        if self.job.levels_steps:
            raise UserError(
                "a batch sampler gives every process equally many micro-batches, so own_lists is not for it; use "
                "packed_batches(..., own_lists=True) and wlb.runtime.level_step"
            )
        self._rank, self._epochs = rank, epochs
        self._pass = 0
        self._counts: list[int] | None = None
        self._state: dict[str, Any] | None = None
        self._batches: PlannedBatches | None = None
        self._followed: deque[StepPlan] | None = None

    def __iter__(self) -> PlannedBatches:
        """One pass, from a loaded state on if there is one; after a finished pass, the next has the next epochs."""
        self._check_reader(sys._getframe(1).f_locals.get("self"))
        if self._state is None and self._batches is not None and self._batches.finished:
            self._pass = self._batches.number + 1
        self._batches = self._begun(self._state)
        if self._followed is not None:
            self._followed.clear()
        self._batches.followed = self._followed
        begin = {"epochs": self._epochs, "pass": self._pass, "state": digest(self._state)}
        self._group.agree(self._batches.steps.settings | begin, self._rank)
        self._state = None
        return self._batches

    def __len__(self) -> int:
        """Batches of a pass, known by planning it. Raises ``TypeError`` where it never ends."""
        if self._epochs is None:
            raise TypeError("a sampler with epochs = None has no length")
        return sum(self.micro_batches_of_steps()) * len(self._processes())

    def micro_batches_of_steps(self) -> list[int]:
        """Micro-batches of every step of a pass on each data-parallel rank, known by planning it.

        They are ``job.micro_batches_per_rank`` but for the last steps, which may have fewer or, where few documents are
        left over, more; and but for a step under the preset "elastic"
        whose few long documents do not suffice for that.
        """
        if self._counts is None:
            self._counts = [len(plan.ranks[0]) for plan in self._steps(self._pass)]
        return self._counts

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be number ``epoch``, unless a state says otherwise; loops call this by themselves."""
        if self._state is None:
            self._pass, self._counts, self._batches = epoch, None, None

    def state_dict(self) -> dict[str, Any]:
        """Where the last iterator is, as JSON-serialisable data; it goes on from there in ``load_state_dict``.

        A loader with workers runs ahead of the loop. ``torchdata``'s ``StatefulDataLoader`` knows by how much and keeps
        the right state; for a plain ``DataLoader`` use ``wlb.integrations.packed.packed_batches``.
        """
        if self._state is not None:
            return dict(self._state)
        return (self._batches or self._begun(None)).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter`` continue from ``state``.

        Documents, seed and shuffle stay; more epochs may be asked for in the first pass; everything else may change
        where ``state`` is between steps. Raises ``UserError`` for anything that cannot be continued.
        """
        self._begun(state)
        self._state, self._pass, self._counts = dict(state), state["pass"], None

    def follow(self) -> deque[StepPlan]:
        """The plans whose micro-batches the last iterator yields, appended as it comes to them; to be taken out."""
        self._followed = deque()
        return self._followed

    @property
    def lengths(self) -> Lengths:
        """Tokens of every document."""
        return self._lengths

    @property
    def processes(self) -> Processes:
        """Those that train together."""
        return self._group

    @property
    def rank(self) -> int | None:
        """The process whose micro-batches are yielded; None where those of all are."""
        return self._rank

    def steps(self, state: Mapping[str, Any] | None = None) -> Iterator[StepPlan]:
        """The plans of a pass, on which nothing here has an effect: what a report or a monitor looks at.

        With ``state``, those that begin after it.
        """
        return self._begun(state).steps

    def _check_reader(self, reader: Any) -> None:
        """Raise ``UserError`` where ``reader``, whose method calls ``iter``, would train something else than planned.

        Nothing but the caller tells of the loader, and of what ``accelerator.prepare`` puts around a batch sampler.
        """
        dealt = type(reader).__name__ == "BatchSamplerShard"
        if dealt and self._rank is not None and reader.num_processes > 1:
            raise UserError(
                f"Accelerate deals the micro-batches of rank = {self._rank} among its processes once more, so most "
                "would not be trained; leave rank out, or do not prepare the loader"
            )
        dataset = getattr(reader, "_dataset", None)  # of the iterator of a DataLoader
        if dealt or dataset is not None:
            check_accumulation()
        if dealt and self._followed is None:
            raise UserError(
                "nothing compares the documents that Accelerate's loader reads with those planned; read it by "
                "steps_of(loader, sampler), which also says where steps end"
            )
        if dataset is not None and hasattr(dataset, "__len__"):
            self._check_dataset(dataset)

    def _check_dataset(self, dataset: Any) -> None:
        """Compare the number of documents and the lengths of some with those planned by."""
        documents = len(self._lengths)
        if len(dataset) != documents:
            raise UserError(
                f"the loader's data set has {len(dataset)} documents and the sampler lengths of {documents}; give the "
                "sampler the lengths of this data set"
            )
        for index in np.unique(np.linspace(0, documents - 1, _COMPARED).astype(int)).tolist():
            tokens = _tokens(dataset[index])
            if tokens not in (None, self._lengths[index]):
                raise UserError(
                    f"document {index} of the loader's data set has {tokens} tokens, and {self._lengths[index]} by the "
                    "sampler's lengths; give it lengths in tokens, without padding, in the order of this data set"
                )

    def _begun(self, state: Mapping[str, Any] | None) -> PlannedBatches:
        batches = PlannedBatches(self._steps, self._pass, self._processes(), self._epochs)
        if state is not None:
            batches.load_state_dict(state)
        return batches

    def _steps(self, number: int) -> WholeSteps:
        first = 0 if self._epochs is None else number * self._epochs
        return WholeSteps(self.job, self._lengths, epochs=self._epochs, first_epoch=first)

    def _processes(self) -> list[int]:
        """The data-parallel rank of each process whose micro-batches are yielded in turn."""
        ranks = [process // self.job.layout.cp for process in range(self.job.layout.dp * self.job.layout.cp)]
        return ranks if self._rank is None else [ranks[self._rank]]


def _tokens(document: Any) -> int | None:
    """Tokens without padding where ``document`` has token ids; None for what a collator is yet to make them of."""
    fields = document if isinstance(document, Mapping) else {"input_ids": document}
    if fields.get("attention_mask") is not None:
        return int(np.count_nonzero(fields["attention_mask"]))
    ids: Any = fields.get("input_ids")
    is_list = isinstance(ids, list) and all(isinstance(token, int) for token in ids[:1])
    return len(ids) if is_list or getattr(ids, "ndim", None) == 1 else None


class PlannedBatches(ItemsOfSteps[list[int]]):
    """One pass over a ``PlannedBatchSampler``; it has the state, so that a loader with workers can keep several."""

    def __init__(
        self, steps_of: Callable[[int], WholeSteps], number: int, processes: Sequence[int], epochs: int | None
    ) -> None:
        super().__init__(steps_of(number), self._documents)
        self.number = number
        self.followed: deque[StepPlan] | None = None
        self._steps_of, self._processes, self._epochs = steps_of, processes, epochs

    def __next__(self) -> list[int]:
        return list(super().__next__())

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue after the last batch, as JSON-serialisable data of the caller's own."""
        state = {"pass": self.number, "epochs": self._epochs, "processes": len(self._processes)}
        return state | super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, as ``PlannedBatchSampler.load_state_dict`` does."""
        inside_step = state["taken"] > 0
        bound = {"epochs": self._epochs} if inside_step or state["pass"] else {}
        bound |= {"processes": len(self._processes)} if inside_step else {}
        for name, now in bound.items():
            if state[name] != now:
                where = "inside a step" if inside_step else "in a later pass"
                raise UserError(
                    f"the state was saved {where} with {name} = {state[name]}, this sampler has {now}; continue with "
                    "what it was saved with"
                )
        self.number, self.steps = state["pass"], self._steps_of(state["pass"])
        super().load_state_dict(state)

    def _documents(self, plan: StepPlan) -> list[list[int]]:
        if self.followed is not None:
            self.followed.append(plan)
        documents = self.steps.settings["documents"]
        return [
            [segment.document % documents for segment in plan.ranks[rank][index].segments]
            for index in range(len(plan.ranks[0]))
            for rank in self._processes
        ]
