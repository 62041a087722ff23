"""Training as one rank, from the first step to the last.

All ranks read the same document lengths and plan the same steps. Each runs its share of its data-parallel rank's
micro-batches through its pipeline stages. After the backward passes the ranks agree on the loss and the gradient norm
and step the optimizer, and rank 0 writes the metrics. Checkpoints save everything, including the loader's state.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import record_function

from wlb.job.config import JobConfig
from wlb.job.planner import waiting_in
from wlb.models.experts import end_step, mixtures
from wlb.models.huggingface.weights import PretrainedWeights
from wlb.packing.plan import StepPlan
from wlb.runtime.batch import Batch
from wlb.runtime.calibration import Calibration
from wlb.runtime.collectives import gathered, gathered_rows, on_every_rank
from wlb.runtime.own_lists import own_batches
from wlb.runtime.steps import RankStep
from wlb.terminal import tell
from wlb.training.checkpoint.checkpointer import Checkpointer
from wlb.training.environment import joined_job
from wlb.training.evaluation import Evaluator
from wlb.training.observe import Reporter, tracing
from wlb.training.optimizer import clip_gradients, learning_rate
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.training.preflight import CheckedJob, check_job, check_shared, directories_of
from wlb.training.process import Terminated, Termination, TrainingError
from wlb.training.rank_model import RankModel, build_model
from wlb.training.stalls import stalls_named
from wlb.training.steps import open_steps

_DOCUMENTS_NAMED = 50  # in a message


def train(config: JobConfig, termination: Termination) -> dict[str, Any] | None:
    """Train the job to its end as one of its ranks; returns the summary on rank 0.

    Raises ``UserError`` for invalid input, ``TrainingError`` if training cannot go on, ``Terminated`` if asked to end.
    """
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limit = config.training.timeout_seconds
    with joined_job(config) as device, stalls_named(limit, termination), ExitStack() as held:
        checked = on_every_rank(lambda: check_job(config, local_processes))
        on_every_rank(lambda: held.enter_context(directories_of(config)) if dist.get_rank() == 0 else None)
        on_every_rank(lambda: check_shared(config))
        return Trainer(checked, device, termination).run()


class Trainer:
    """One rank of a job: builds everything, continues from the newest checkpoint, and trains."""

    def __init__(self, checked: CheckedJob, device: torch.device, termination: Termination | None = None) -> None:
        self.config = checked.config
        self.termination = termination or Termination()
        config, job, training = checked.config, checked.job, checked.config.training
        self.model = model = build_model(checked, device)
        calibrates = training.calibrate and job.levels_steps and job.layout.tp == job.layout.ep == 1
        self.calibration = Calibration(training.calibrate, job.layout.pool_size, device) if calibrates else None
        runs = job.rank_micro_batches, model.execution, self.calibration
        self.runner = PipelineRunner(model.stages, job.layout, model.mesh, *runs)
        self.checkpointer = Checkpointer(config.checkpoint, checked.model, model.stages, model.optimizers)
        self.step, state = 0, None
        if model.checkpoints:
            self.step, state = self.checkpointer.load(model.checkpoints)
        elif config.model.pretrained is not None:
            PretrainedWeights(config.model.pretrained).load(*model.stages)
        self.planned = open_steps(
            *(checked.store, job, training),
            share=model.share,
            state=state,
            calibration=self.calibration,
            asked_to_end=self.termination.asked.is_set,
        )
        self.reporter = Reporter(checked, model.execution, self.step) if dist.get_rank() == 0 else None
        evaluated = self.reporter.evaluated if self.reporter else 0
        self.evaluator = None if config.evaluation.store is None else Evaluator(model, evaluated)

        directory = config.checkpoint.dir
        kept = f"the same command continues from the newest checkpoint in {directory}, if there is one"
        self._kept = kept if directory else "nothing is saved without checkpoint.dir"

    def run(self) -> dict[str, Any] | None:
        """Train until ``training.steps``, or to the end of the epoch; returns the summary on rank 0."""
        try:
            for _ in self.steps():
                pass
        except Terminated:
            if self.reporter:
                self.reporter.finish()
            raise
        if self.reporter is None:
            return None
        planner = self.planned.state_dict()["planner"]  # of the documents read from the job's first step on
        pending = {segment.document for segment in waiting_in(planner)}  # not wholly trained
        totals = {"overlong": planner["stream"]["overlong"], "pending_documents": len(pending)}
        return self.reporter.finish() | totals

    def steps(self) -> Iterator[int]:
        """Train step after step, yielding the number of each; checkpoints as they fall due and at the end.

        Raises ``Terminated``, after saving everything, if a rank was asked to end.
        """
        saved = self.step
        self.termination.allow(self.config.training.grace_seconds, self._kept)
        with closing(self.planned), tracing(self.config.metrics, self.model.execution.device) as trace:
            self._evaluate()  # the evaluation that a signal may have stopped in the job before this one
            while loaded := self._next_step():
                self.step += 1
                self._train_step(loaded)
                if self.calibration is not None and self.calibration.end_step() and self.reporter:
                    tell(f"planning from now on with prices measured up to step {self.step}: {self.calibration}")
                self._evaluate()  # before the checkpoint, so that a job which continues from it has it on record
                if self.checkpointer.is_due(self.step):
                    self._save()
                    saved = self.step
                trace.step()
                yield self.step
            terminated = self.planned.ended_early
            terminated |= self._evaluate(last=not terminated)
            if self.step != saved and self.checkpointer.enabled:
                self._save()
            self.checkpointer.finish()
        if terminated:
            raise Terminated(f"terminated after step {self.step}; {self._kept}")

    def _next_step(self) -> RankStep[Batch] | None:
        if self.step >= (self.config.training.steps or math.inf):
            return None
        self.termination.step = self.step + 1
        with record_function("data"):
            return next(self.planned, None)

    def _train_step(self, loaded: RankStep[Batch]) -> None:
        started = time.perf_counter()
        outcome, computed = train_step(self.step, loaded, self.model, self.runner)
        if self.reporter:
            seconds = loaded.wait_seconds + time.perf_counter() - started
            self.reporter.record(self.step, loaded, outcome, computed, seconds)

    def _evaluate(self, *, last: bool = False) -> bool:
        """Evaluate if it is due; returns whether it stopped early because a rank was asked to end."""
        if self.evaluator is None:
            return False
        evaluation = self.evaluator.after(self.step, last=last, asked_to_end=self.termination.asked.is_set)
        if self.reporter and evaluation:
            self.reporter.record_evaluation(self.step, evaluation)
        return self.evaluator.broken_off

    def _save(self) -> None:
        with record_function("checkpoint"):
            self.checkpointer.save(self.step, self.planned.state_dict())  # after the last step taken, so trained


def train_step(
    step: int, loaded: RankStep[Batch], model: RankModel, runner: PipelineRunner
) -> tuple[dict[str, float], NDArray[np.float64]]:
    """Train ``loaded`` as step ``step``; returns its outcome and the seconds that each rank computed, shape (ranks,).

    Raises ``TrainingError`` and leaves the weights unchanged if the loss or the gradient norm is not finite.
    """
    training = model.checked.config.training
    rate = learning_rate(step, training)
    for optimizer in model.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
    losses = training.balance_loss / loaded.plan.tokens, training.router_z_loss / loaded.plan.tokens
    share = runner.run_step(loaded.batches, loaded.loss_tokens, loaded.plan.operations, losses)
    loss, computed = of_all_ranks(share, runner.clock.end_step())
    with record_function("gradient norm"):
        grad_norm = clip_gradients(model.stages, training.gradient_clip)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):  # on every rank alike
        documents = _documents_to_blame(loaded.plan, model, runner.losses)
        raise TrainingError(f"step {step}: loss is {loss} and gradient norm {grad_norm}; {documents}")
    outcome = {"loss": loss, "grad_norm": grad_norm, "learning_rate": rate}
    with record_function("optimizer"):
        for optimizer in model.optimizers:
            optimizer.step()
        if (shape := model.checked.job.shape).experts is not None:
            of_step = mixtures(model.stages), runner.routed, shape, model.execution.device
            counts_LE = end_step(*of_step, training.router_bias_rate)
            outcome["busiest_expert"] = float((counts_LE.max(-1).values / counts_LE.double().mean(-1)).mean())
    return outcome, computed


def of_all_ranks(loss_share: Tensor, seconds: float) -> tuple[float, NDArray[np.float64]]:
    """The loss of a step, which is the sum of the shares, and the ``seconds`` of each rank, shape (ranks,)."""
    rows = gathered_rows([float(loss_share), seconds], torch.float64, loss_share.device)
    return float(rows[:, 0].sum()), rows[:, 1].numpy()


def _documents_to_blame(plan: StepPlan, model: RankModel, losses: Sequence[Tensor]) -> str:
    """The documents of micro-batches whose loss is not finite; ``losses`` are this rank's, if it ran the head."""
    mine = own_batches(plan, model.share.dp_rank, model.share.cp_rank, lambda part: part.segments)
    pairs = zip(mine, losses, strict=False)
    found = [segment.document for segments, loss in pairs if not torch.isfinite(loss) for segment in segments]
    documents = {document for of_rank in gathered(found) for document in of_rank}
    if not documents:
        return "the loss of every micro-batch is finite"
    named = ", ".join(map(str, sorted(documents)[:_DOCUMENTS_NAMED]))
    more = f" and {len(documents) - _DOCUMENTS_NAMED} more" if len(documents) > _DOCUMENTS_NAMED else ""
    return f"not finite in the micro-batches of documents {named}{more}"
