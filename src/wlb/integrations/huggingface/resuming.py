"""Checkpoints of a balanced Trainer continue with the documents that come next.

Trainer resumes by counting: it passes over as many batches as its steps had. That is right only where every setting is
what it was, so the state of the sampler goes into ``trainer_state.json``, as that of a callback, and the batches of a
resumed run begin there. Before them come empty ones for Trainer to pass over, which nothing reads; its count of steps,
and the steps that remain, are then right with any number of micro-batches and processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, repeat
from pathlib import Path
from typing import Any

from wlb.errors import UserError, require
from wlb.integrations.batches import PlannedBatchSampler
from wlb.packing.plan import StepPlan

STATE = "BalancedState"  # of the callback, in trainer_state.json
_PLANNED = 64  # steps of an endless stream that are looked at before training; planning all would take minutes


class TrainedBatches:
    """The batch sampler of one call of ``train``: ``steps`` done, the rest planned, with the state between any two.

    ``max_steps`` is where an endless ``sampler`` stops. Raises ``UserError`` where a step in between has too few
    documents for all of its micro-batches, as Trainer accumulates equally many.
    """

    batch_size: int | None = None
    drop_last = True

    def __init__(
        self, sampler: PlannedBatchSampler, max_steps: int, steps: int = 0, state: Mapping[str, Any] | None = None
    ) -> None:
        self.is_continued = state is not None
        self._sampler, self._done, self._stop = sampler, steps, max_steps if max_steps > 0 else None
        sampler.set_epoch(0)
        self._state = sampler.state_dict() if state is None else dict(state)
        self._states = {steps: self._state}  # after as many steps
        wanted = sampler.job.micro_batches_per_rank
        self._counts, self._documents = [], 0
        for plan in islice(self.plans(), None if self._stop is None else _PLANNED):
            self._counts.append(len(plan.ranks[0]))
            self._documents += sum(len(micro_batch.segments) for micro_batch in plan.micro_batches)
        self._steps = -(-sum(self._counts) // wanted)  # of the Trainer
        for count in self._counts if self._stop is not None else self._counts[:-1]:
            self._check_step(count)
        if self._stop is not None:
            self._counts = [wanted] * max(0, self._stop - steps)

    def __len__(self) -> int:
        return self._passed_over + sum(self._counts) * self._processes

    def __iter__(self) -> Iterator[list[int]]:
        self._states = {self._done: self._state}
        self._sampler.load_state_dict(self._state)
        batches = iter(self._sampler)
        yield from repeat([], self._passed_over)
        step, wanted = self._done, self._sampler.job.micro_batches_per_rank
        for count in self._counts:
            of_step = count * self._processes
            step += -(-count // wanted)  # Trainer makes several steps of a last one with more micro-batches
            for number in range(1, of_step + 1):
                batch = next(batches)
                if batches.of_step != of_step:
                    self._check_step(batches.of_step // self._processes)
                if number == of_step:
                    self._states[step] = batches.state_dict()
                yield batch

    def documents(self, steps: int) -> float:
        """How many are trained in ``steps`` of the Trainer, those planned here being like all; once for each epoch."""
        return self._documents * steps / max(1, self._steps)

    def agree(self) -> None:
        """Compare on all processes what they are about to train; a collective call. Raises ``UserError`` on all."""
        self._sampler.load_state_dict(self._state)
        iter(self._sampler)

    def _check_step(self, count: int) -> None:
        wanted = self._sampler.job.micro_batches_per_rank
        if count != wanted:
            raise UserError(
                f"a step has documents for only {count} of its {wanted} micro-batches; give more "
                "gradient_accumulation_steps, a smaller pool_micro_batches, or preset = 'best'"
            )

    def plans(self) -> Iterator[StepPlan]:
        """Of the steps that are yet to be trained."""
        left = None if self._stop is None else max(0, self._stop - self._done)
        return islice(self._sampler.steps(self._state), left)

    def state_after(self, steps: int) -> dict[str, Any] | None:
        """The sampler's state, however far ahead a loader is; earlier ones are forgotten."""
        for earlier in [number for number in self._states if number < steps]:
            del self._states[earlier]
        return self._states.get(steps)

    @property
    def _processes(self) -> int:
        return self._sampler.job.layout.dp * self._sampler.job.layout.cp

    @property
    def _passed_over(self) -> int:
        return self._done * self._sampler.job.micro_batches_per_rank * self._processes


def trained_state(args: Any, resume_from_checkpoint: str | bool | None) -> tuple[int, dict[str, Any]] | None:
    """Steps, and the sampler's state after them, of the checkpoint that Trainer is to resume from; None without one.

    Raises ``UserError`` for a checkpoint that has no such state.
    """
    if not resume_from_checkpoint:
        return None
    last: Callable[[str], str | None] = require("transformers.trainer_utils", "hf").get_last_checkpoint
    folder = last(args.output_dir) if isinstance(resume_from_checkpoint, bool) else resume_from_checkpoint
    if folder is None:
        return None  # which Trainer refuses
    path = Path(folder) / "trainer_state.json"
    saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    exported = (saved.get("stateful_callbacks") or {}).get(STATE) or {}
    state = json.loads(exported.get("attributes", {}).get("saved", "null"))
    if state is None:
        raise UserError(
            f"the checkpoint {folder} does not say which documents were trained, so it cannot be continued exactly; "
            "begin anew from its weights (from_pretrained), or train on without balanced()"
        )
    return saved["global_step"], state
