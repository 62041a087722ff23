"""Training, from the first step to the last, as one rank sees it.

All ranks read the same document lengths and plan the same steps; each takes its share of its data-parallel rank's
micro-batches through its part of its pipeline stages. After the backward passes the ranks agree on the loss and the
gradient norm, step the optimizer, and rank 0 writes the metrics. Every ``checkpoint.every`` steps all of it is saved,
the loader included.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from wlb.attention.profiler_regions import region
from wlb.job.config import JobConfig
from wlb.runtime.collectives import on_every_rank
from wlb.training.checkpoint.checkpointer import Progress
from wlb.training.checkpoint.resuming import what_is_kept
from wlb.training.data.loader import LoadedStep
from wlb.training.directory_lock import check_shared, directories_of
from wlb.training.environment import joined_job
from wlb.training.evaluation.evaluator import Evaluator
from wlb.training.failures import Terminated
from wlb.training.phases import (
    build_loader,
    build_model,
    build_pipeline,
    build_reporter,
    restore,
)
from wlb.training.preflight import CheckedJob, check_agreed, check_job, least_limit
from wlb.training.stalls import BegunStep, stalls_named
from wlb.training.step import agree_to_train, train_step
from wlb.training.termination import Termination


def train(config: JobConfig, termination: Termination) -> dict[str, Any] | None:
    """Train the job to its end as one of its ranks; returns the summary on rank 0.

    Raises ``UserError`` for invalid user input, ``TrainingError`` where training cannot go on and ``Terminated``
    where any rank was asked to end.
    """
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    begun, limit = BegunStep(), config.training.timeout_seconds
    with joined_job(config) as device, stalls_named(limit, begun), ExitStack() as held:
        memory = least_limit(device.type, local_processes)
        checked = on_every_rank(lambda: check_job(config, local_processes, memory))
        check_agreed(checked.job)
        on_every_rank(lambda: held.enter_context(directories_of(config)) if dist.get_rank() == 0 else None)
        on_every_rank(lambda: check_shared(config))
        return Trainer(checked, device, termination, begun).run()


class Trainer:
    """One rank of a job: builds everything, continues from the newest checkpoint, and trains."""

    def __init__(
        self,
        checked: CheckedJob,
        device: torch.device,
        termination: Termination | None = None,
        begun: BegunStep | None = None,
    ) -> None:
        self.config = checked.config
        self.termination = termination or Termination()
        self.begun = begun or BegunStep()

        self.model = build_model(checked, device)
        self.runner, self.monitor = build_pipeline(self.model)
        self.checkpointer, progress = restore(self.model)
        self.step = progress.step if progress else 0
        self.loader = build_loader(self.model, progress)
        self.reporter = build_reporter(self.model, self.step)
        self.evaluator: Evaluator | None = None
        if self.config.evaluation.store is not None:
            self.evaluator = Evaluator(self.model, self.reporter.evaluated if self.reporter else 0)

        self._trained = self.loader.state_dict()
        self._last_step = self.config.training.steps or math.inf

    def run(self) -> dict[str, Any] | None:
        """Train until ``training.steps``, or to the end of the epoch; returns the summary on rank 0."""
        try:
            for _ in self.steps():
                pass
        except Terminated:
            if self.reporter:
                self.reporter.finish()
            raise
        return self.reporter.finish() | self.loader.totals() if self.reporter else None

    def steps(self) -> Iterator[int]:
        """Train step after step, yielding the number of each; checkpoints as they fall due and at the end.

        Raises ``Terminated``, with everything saved, where a rank was asked to end.
        """
        saved = self.step
        terminated = False
        self.termination.allow(self.config.training.grace_seconds, self._what_is_kept)
        with self.loader, self.monitor.trace:
            self._evaluate()  # what the job before this one was asked to end in
            while loaded := self._next_step():
                self.begun.number = self.step + 1
                if terminated := not agree_to_train(self.step + 1, loaded, self.model, self.termination.requested):
                    break  # what was loaded is not trained, so it is not in self._trained
                self.step += 1
                self._train_step(loaded)
                self._trained = self.loader.state_dict()
                self._evaluate()  # before the checkpoint, so that it is on record where a job continues from it
                if self.checkpointer.is_due(self.step):
                    self._save()
                    saved = self.step
                self.monitor.trace.step()
                yield self.step
            terminated |= self._evaluate(last=not terminated)
            if self.step != saved and self.checkpointer.enabled:
                self._save()
            self.checkpointer.finish()
        if terminated:
            raise Terminated(f"terminated after step {self.step}; {self._what_is_kept()}")

    def _next_step(self) -> LoadedStep | None:
        with region("data"):
            return next(self.loader, None) if self.step < self._last_step else None

    def _train_step(self, loaded: LoadedStep) -> None:
        started = time.perf_counter()
        outcome, rows = train_step(self.step, loaded, self.model, self.runner, self.monitor)
        if self.reporter:
            seconds = loaded.wait_seconds + time.perf_counter() - started
            self.reporter.record(self.step, loaded, outcome._replace(step_seconds=seconds), rows)

    def _evaluate(self, *, last: bool = False) -> bool:
        """Evaluate where that is due; whether it was broken off, as a rank was asked to end."""
        if self.evaluator is None:
            return False
        evaluation = self.evaluator.after(self.step, last=last, asked_to_end=lambda: self.termination.requested)
        if self.reporter and evaluation:
            self.reporter.record_evaluation(self.step, evaluation)
        return self.evaluator.broken_off

    def _save(self) -> None:
        with region("checkpoint"):
            self.checkpointer.save(Progress(self.step, self._trained))

    def _what_is_kept(self) -> str:
        return what_is_kept(self.config.checkpoint, self.step)
