"""The train loader of a balanced Trainer: micro-batches of ``PackedSteps``, from the step on that comes next.

A Trainer resumes by passing over batches, which is right only where every setting is what it was. So the state of the
steps is in ``trainer_state.json``, and the loader of a resumed run begins after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from wlb.errors import UserError, require
from wlb.integrations.packed import PackedBatch, PackedSteps
from wlb.runtime.batch import IGNORE_LABEL

_PLANNED = 64  # steps of an endless stream that are looked at before training; planning all would take minutes


class TrainLoader:
    """Micro-batches of this process after ``begin``: the Trainer's steps done, its epoch, and the state of ``steps``.

    ``max_steps`` > 0 is where an endless stream stops. ``all_steps`` are the Trainer's, those done included, with
    ``documents_a_step`` on average; ``epoch`` is where the last step that was read ends. Raises ``UserError`` where a
    step but the last has other than the job's number of micro-batches, as Trainer accumulates equally many.
    """

    def __init__(self, steps: PackedSteps, max_steps: int, begin: tuple[int, float, Mapping[str, Any]]) -> None:
        self._steps, self.begin, self._endless = steps, begin, max_steps > 0
        self._wanted, self._step, self.epoch = steps.job.micro_batches_per_rank, *begin[:2]
        self._inner: dict[int, PackedBatch] = {}  # neither first nor last of their step, by the id of their inputs
        self.rewind()
        plans = [*islice(steps.plans(), _PLANNED if self._endless else None)]
        counts = [len(plan.ranks[0]) for plan in plans]
        self._check_counts(counts if self._endless else counts[:-1])
        planned = -(-sum(counts) // self._wanted)  # Trainer makes several steps of a last one with more micro-batches
        self.all_steps = max_steps if self._endless else begin[0] + planned
        self._left = (max_steps - begin[0]) * self._wanted if self._endless else sum(counts)
        self.documents_a_step = sum(len([*plan.segments]) for plan in plans) / max(1, planned)

    def __len__(self) -> int:
        return max(1, self._left)  # Trainer refuses an empty loader; where nothing is left it does not read this one

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.rewind()
        trained, documents = round(self.epoch * len(self._steps.lengths)), len(self._steps.lengths)
        for step in self._steps:
            if self._endless:
                self._check_counts([len(step.batches)])
            *others, last = [(batch, inputs_of(batch)) for batch in step.batches]
            self._inner = {id(inputs): batch for batch, inputs in others[1:]}
            yield from (inputs for _, inputs in others)
            self._step += -(-len(step.batches) // self._wanted)
            trained += len([*step.plan.segments])
            self.epoch = trained / documents
            yield last[1]

    def rewind(self) -> None:
        """Go back to the beginning."""
        self._step, self.epoch, state = self.begin
        self._steps.load_state_dict(state)

    def timing(self, inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Time what runs inside for the calibration, but for a step's first and last, in which ranks wait."""
        batch, calibration = self._inner.get(id(inputs)), self._steps.calibration
        return nullcontext() if batch is None or calibration is None else calibration.timing(batch)

    def end_step(self, step: int) -> None:
        """Calibrate, where that is due, after the Trainer's ``step``; a collective call."""
        if step == self._step and self._steps.calibration is not None:
            self._steps.calibration.end_step()

    def state_after(self, step: int) -> dict[str, Any] | None:
        """What to begin with after the Trainer's ``step``; None inside a planned step, or where more was read."""
        return self._steps.state_dict() if step == self._step else None

    def _check_counts(self, counts: list[int]) -> None:
        for count in counts:
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


def trained_state(args: Any, resume_from_checkpoint: str | bool | None) -> tuple[int, float, dict[str, Any]] | None:
    """Where the checkpoint ends that Trainer is to resume from, for ``TrainLoader`` to begin; None without one.

    Raises ``UserError`` for a checkpoint that does not say it.
    """
    folder: Any = resume_from_checkpoint
    if folder is True:
        folder = require("transformers.trainer_utils", "hf").get_last_checkpoint(args.output_dir)
    if not folder:
        return None  # which Trainer refuses where it was asked for one
    path = Path(folder) / "trainer_state.json"
    saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    exported = (saved.get("stateful_callbacks") or {}).get("BalancedState", {})
    if state := json.loads(exported.get("attributes", {}).get("saved", "null")):
        return saved["global_step"], saved["epoch"] or 0.0, state
    raise UserError(
        f"the checkpoint {folder} does not say which documents were trained, so it cannot be continued exactly; begin "
        "anew from its weights (from_pretrained), or train on without balanced()"
    )
