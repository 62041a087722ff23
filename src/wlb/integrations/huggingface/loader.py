"""The train loader of a balanced Trainer: micro-batches of ``PackedSteps``, from the step on that comes next.

A Trainer resumes by passing over as many batches as its steps had, which is right only where every setting is what it
was. Here the state of ``PackedSteps`` is in ``trainer_state.json``, and the loader of a resumed run begins after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from wlb.errors import UserError, require
from wlb.integrations.packed import PackedBatch, PackedSteps
from wlb.runtime.batch import IGNORE_LABEL

STATE = "BalancedState"  # of the callback, in trainer_state.json
_PLANNED = 64  # steps of an endless stream that are looked at before training; planning all would take minutes


class StepLoader:
    """Micro-batches of this process, after ``done`` steps and the ``state`` of ``steps``; iterating begins anew there.

    ``max_steps`` > 0 is where an endless stream stops. ``all_steps`` are the Trainer's, those done included, with
    ``documents_a_step`` on average. ``documents`` of all processes were trained by the time that ``step`` steps are.
    Raises ``UserError`` where a step but the last has other than the job's number of micro-batches, as Trainer
    accumulates equally many.
    """

    def __init__(self, steps: PackedSteps, state: Mapping[str, Any], max_steps: int, done: int = 0) -> None:
        steps.load_state_dict(state)
        self._steps, self.state, self._done, self._endless = steps, state, done, max_steps > 0
        self._wanted = steps.job.micro_batches_per_rank
        plans = islice(steps.plans(), _PLANNED if self._endless else None)
        sizes = [(len(plan.ranks[0]), sum(1 for _ in plan.segments)) for plan in plans]
        for count, _ in sizes if self._endless else sizes[:-1]:
            self._check_step(count)
        planned = sum(count for count, _ in sizes)
        steps_planned = -(-planned // self._wanted)  # Trainer makes several steps of a last one with more micro-batches
        self._left = max(0, max_steps - done) * self._wanted if self._endless else planned
        self.all_steps = max_steps if self._endless else done + steps_planned
        self.documents_a_step = sum(documents for _, documents in sizes) / max(1, steps_planned)
        self.step, self.documents = done, 0
        self._timed: dict[int, PackedBatch] = {}

    def __len__(self) -> int:
        return max(1, self._left)  # Trainer refuses an empty loader; where nothing is left it does not read this one

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._steps.load_state_dict(self.state)
        self.step, self.documents, left = self._done, 0, self._left
        for step in self._steps:
            left -= len(step.batches)
            if left or self._endless:
                self._check_step(len(step.batches))
            *others, last = [(batch, inputs_of(batch)) for batch in step.batches]
            self._timed = {id(inputs): batch for batch, inputs in others[1:]}
            yield from (inputs for _, inputs in others)
            self.step += -(-len(step.batches) // self._wanted)
            self.documents += sum(1 for _ in step.plan.segments)
            yield last[1]

    def agree(self) -> None:
        """Compare on all processes what they are about to train; a collective call. Raises ``UserError`` on all."""
        self._steps.load_state_dict(self.state)
        self._steps.agree()

    def timing(self, inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Time what runs inside for the calibration, but for a step's first and last, in which ranks wait."""
        batch = self._timed.pop(id(inputs), None)
        calibration = self._steps.calibration
        return nullcontext() if batch is None or calibration is None else calibration.timing(batch)

    def _check_step(self, count: int) -> None:
        if count != self._wanted:
            raise UserError(
                f"a step has documents for only {count} of its {self._wanted} micro-batches; give more "
                "gradient_accumulation_steps, a smaller pool_micro_batches, or preset = 'best'"
            )


def inputs_of(batch: PackedBatch) -> dict[str, Any]:
    """The keywords of ``batch`` with ``labels``, of shape (1, tokens), which Trainer counts and losses shift.

    In a share the next token may lie on another rank. So it has ``shift_labels``, the token to predict at each place,
    as well as ``labels`` with the same one place further on, and a last token that is neither attended nor learnt.
    """
    labels = F.pad(batch.labels[None], (1, 0), value=IGNORE_LABEL)
    if batch.attend is None:
        return {**batch, "labels": labels[:, :-1]}  # the last token, the end of a document, predicts nothing
    rows = {name: F.pad(batch[name], (0, 1)) for name in ("input_ids", "position_ids")}
    shifted = F.pad(batch.labels[None], (0, 1), value=IGNORE_LABEL)
    return {**batch, **rows, "labels": labels, "shift_labels": shifted}


def trained_state(args: Any, resume_from_checkpoint: str | bool | None) -> tuple[int, dict[str, Any]] | None:
    """Steps, and the state after them, of the checkpoint that Trainer is to resume from; None without one.

    Raises ``UserError`` for a checkpoint that has no such state.
    """
    last: Callable[[str], str | None] = require("transformers.trainer_utils", "hf").get_last_checkpoint
    folder = last(args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
    if not folder:
        return None  # which Trainer refuses where it was asked for one
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
