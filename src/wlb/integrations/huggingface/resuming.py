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

STATE = "BalancedState"  # of the callback, in trainer_state.json
_PLANNED = 64  # steps of an endless stream that are looked at before training; planning all would take minutes


class TrainedBatches:
    """The batch sampler of one call of ``train``: ``done`` steps for Trainer to pass over, and those yet to be trained.

    ``states`` has, after each step that a loader has come to, the sampler's state and the documents trained since
    ``done``. ``max_steps`` is where an endless ``sampler`` stops. Raises ``UserError`` where a step in between has too
    few documents for all of its micro-batches, as Trainer accumulates equally many.
    """

    batch_size: int | None = None
    drop_last = True

    def __init__(
        self, sampler: PlannedBatchSampler, max_steps: int, done: int = 0, state: Mapping[str, Any] | None = None
    ) -> None:
        self.is_continued, self._sampler, self._done, self._endless = state is not None, sampler, done, max_steps > 0
        sampler.set_epoch(0)
        self._state = sampler.state_dict() if state is None else dict(state)
        self._wanted = sampler.job.micro_batches_per_rank
        self._processes = sampler.job.layout.dp * sampler.job.layout.cp
        plans = list(islice(sampler.steps(self._state), _PLANNED if self._endless else None))
        counts = [len(plan.ranks[0]) for plan in plans]
        for count in counts if self._endless else counts[:-1]:
            self._check_step(count)
        self._left = max(0, max_steps - done) * self._wanted if self._endless else sum(counts)
        steps = max(1, -(-sum(counts) // self._wanted))
        self.documents_a_step = (
            sum(len([*plan.segments]) for plan in plans) / steps
        )  # on average, of the Trainer's steps
        self.states: dict[int, tuple[dict[str, Any], int]] = {}

    def __len__(self) -> int:
        return (self._done * self._wanted + self._left) * self._processes

    def __iter__(self) -> Iterator[list[int]]:
        self.states = {self._done: (self._state, 0)}
        self._sampler.load_state_dict(self._state)
        batches = iter(self._sampler)
        yield from repeat([], self._done * self._wanted * self._processes)
        number, left, trained = self._done, self._left, 0
        while left > 0:
            step = [next(batches)]
            step += [next(batches) for _ in range(batches.of_step - 1)]
            count = len(step) // self._processes
            left -= count
            if left or self._endless:
                self._check_step(count)
            number += -(-count // self._wanted)  # Trainer makes several steps of a last one with more micro-batches
            trained += sum(map(len, step)) // self._sampler.job.layout.cp
            self.states[number] = (batches.state_dict(), trained)
            yield from step

    def agree(self) -> None:
        """Compare on all processes what they are about to train; a collective call. Raises ``UserError`` on all."""
        self._sampler.load_state_dict(self._state)
        iter(self._sampler)

    def _check_step(self, count: int) -> None:
        if count != self._wanted:
            raise UserError(
                f"a step has documents for only {count} of its {self._wanted} micro-batches; give more "
                "gradient_accumulation_steps, a smaller pool_micro_batches, or preset = 'best'"
            )


def trained_state(args: Any, resume_from_checkpoint: str | bool | None) -> tuple[int, dict[str, Any]] | None:
    """Steps, and the sampler's state after them, of the checkpoint that Trainer is to resume from; None without one.

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
