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

from wlb.errors import UserError, require
from wlb.integrations.packed import PackedBatch, PackedSteps

_PLANNED = 64  # steps of an endless stream that are looked at before training; planning all would take minutes


class TrainLoader:
    """Micro-batches of this process after ``begin``: the Trainer's steps done, its epoch, and the state of ``steps``.

    As a Trainer accumulates equally many in every step, empty ones fill a planned step that has fewer, and one that has
    more is several of the Trainer's. ``all_steps`` are the Trainer's, those done included, up to ``max_steps`` where
    that is positive, with ``documents_a_step`` on average. ``step`` and ``epoch`` are where what was read ends.
    """

    def __init__(self, steps: PackedSteps, max_steps: int, begin: tuple[int, float, Mapping[str, Any]]) -> None:
        self._steps, self._begin, self._wanted = steps, begin, steps.job.micro_batches_per_rank
        self._inner: dict[int, PackedBatch] = {}  # neither first nor last of their step, by the id of their inputs
        self.rewind()
        plans = [*islice(steps.plans(), _PLANNED if max_steps > 0 else None)]
        planned = sum(self._steps_for(len(plan.ranks[0])) for plan in plans)
        self.all_steps = max_steps if max_steps > 0 else begin[0] + planned
        self.documents_a_step = sum(len([*plan.segments]) for plan in plans) / max(1, planned)

    def rewind(self) -> None:
        """Go back to the beginning."""
        self.step, self.epoch, state = self._begin
        self._steps.load_state_dict(state)

    def __len__(self) -> int:
        left = self.all_steps - self._begin[0]
        return max(1, left * self._wanted)  # Trainer refuses an empty loader; where nothing is left it reads nothing

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.rewind()
        documents = len(self._steps.lengths)
        trained = round(self.epoch * documents)
        for step in self._steps:
            batches = [*step.batches]
            batches += [self._steps.batch_of([])] * (-len(batches) % self._wanted)
            *others, last = (batch.with_labels() for batch in batches)
            self._inner = {id(inputs): batch for inputs, batch in zip(others[1:], batches[1:-1], strict=True)}
            yield from others
            self.step += self._steps_for(len(batches))
            trained += len([*step.plan.segments])
            self.epoch = trained / documents
            yield last

    def timing(self, inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Time what runs inside for the calibration, but for a step's first and last, in which ranks wait."""
        batch, calibration = self._inner.get(id(inputs)), self._steps.calibration
        return nullcontext() if batch is None or calibration is None else calibration.timing(batch)

    def _steps_for(self, micro_batches: int) -> int:
        return -(-micro_batches // self._wanted)


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
