"""Rank 0's reports: the start of a job, every step, slow ranks, and where the time went.

The first step of a run is left out of warnings and diagnosis: it warms up caches and allocators, and compiles.

Model FLOPs utilisation is what the model's arithmetic needs, over what the devices could do in the time, as PaLM
defines it (arXiv 2204.02311, appendix B): the operations of the model's products once forward and twice backward,
whatever an implementation recomputes, here with causal attention inside segments counted by its pairs. The peak is the
hardware preset's, in bfloat16 on a GPU and float32 on a CPU. That of a CPU is for one core, so a rank has as many as
threads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from wlb.documents.store.files import source_name
from wlb.files import replace_text
from wlb.packing.plan import StepPlan
from wlb.terminal import next_command, number_of
from wlb.training.console import say
from wlb.training.data.loader import LoadedStep, StepLoader
from wlb.training.environment import (
    dense_attention_warning,
    hardware_name,
    shared_store_warning,
    slow_attention_note,
    tokenizer_warning,
)
from wlb.training.evaluation.held_out import Evaluation
from wlb.training.observe.diagnosis import FILE, RankName, StragglerWatch, diagnose, render
from wlb.training.observe.imbalance import RankSteps, imbalance_of
from wlb.training.observe.metrics import LEGEND, MetricsWriter
from wlb.training.parallel.mesh import mesh_shape
from wlb.training.parallel.parallelize import Execution
from wlb.training.preflight import CheckedJob
from wlb.workload import ModelShape, attention_flops, hardware_preset, linear_flops

_PASSES = 3.0  # one forward, and a backward of twice its operations


class StepOutcome(NamedTuple):
    """What a step came to; ``skipped`` says why the weights were not changed, if they were not."""

    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    skipped: str | None


class Reporter:
    """Reports on a job that continues after ``step``; ``names`` are those of the ranks. On rank 0 only.

    ``evaluated`` is the last step up to it whose evaluation is on record.
    """

    def __init__(self, checked: CheckedJob, names: Sequence[RankName], execution: Execution, step: int) -> None:
        self._config = checked.config
        self._job = checked.job
        self._store = checked.store
        self._names = names
        self._execution = execution
        self._first = self._step = step
        self._metrics = MetricsWriter(self._config.metrics, step, pooled=self._job.pools is not None)
        self.evaluated = self._metrics.evaluated
        layout, metrics, device = self._job.layout, self._config.metrics, execution.device
        self._mesh_shape = mesh_shape(layout)
        self._micro_batches = None if self._job.levels_steps else self._job.micro_batches_per_rank
        self._peak = peak_flops(hardware_name(device), device) * layout.world_size
        self._watch = StragglerWatch(names, layout.pp, metrics.straggler_factor)
        self._measured: list[tuple[int, RankSteps, float]] = []  # the last steps, with their seconds
        self._diagnosis = metrics.dir / FILE
        self._diagnosis.unlink(missing_ok=True)  # an earlier run's

    def begin(self, loader: StepLoader) -> None:
        """Say where the job goes on and on what, and what its user should know of that."""
        for line in self._startup(loader):
            say(line)

    def record(self, step: int, loaded: LoadedStep, outcome: StepOutcome, rows: RankSteps) -> None:
        """Take in a step that was trained; ``rows`` are the seconds of all ranks.

        Warns of slow ranks, and writes the diagnosis when it is due.
        """
        self._step = step
        if outcome.skipped:
            say(outcome.skipped)
        self._look_at(rows, outcome.seconds)
        plan, planned, listed = loaded.plan, loaded.planned, self._config.metrics.document_ids
        row = {
            "step": step,
            "loss": outcome.loss,
            "grad_norm": outcome.grad_norm,
            "learning_rate": outcome.learning_rate,
            "tokens": plan.tokens,
            "documents": len(planned.documents),
            "step_seconds": outcome.seconds,
            "tokens_per_second": plan.tokens / outcome.seconds,
            "imbalance_degree": plan.imbalance,
            "token_delay": plan.delay_token_steps / plan.tokens,
            "data_wait_seconds": loaded.wait_seconds,
            "planning_seconds": planned.planning_seconds,
            "pending_documents": planned.pending_documents,
            "mfu": model_flops(self._job.shape, plan) / (outcome.seconds * self._peak),
            "imbalance": imbalance_of([rows], self._mesh_shape, self._micro_batches),
            "slow_ranks": sorted(self._watch.slow),
            "document_ids": planned.documents if listed else None,
            "segments": sorted(plan.segments) if listed == "segments" else None,
            "store_tokens": self._store_tokens(plan),
            "loss_tokens": loaded.loss_tokens,
        }
        self._metrics.write(row)

    def record_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._metrics.write_evaluation(step, evaluation)

    def finish(self) -> dict[str, Any]:
        """Close the files, print the diagnosis and what the run came to; returns the summary of all steps."""
        self._metrics.close()
        diagnosis = self._diagnose()
        if diagnosis:
            say(render(diagnosis))
        if lines := [*self._metrics.closing_lines()]:
            say("\n".join([*lines, *self._closing_lines(diagnosis)]))
        return self._metrics.summary()

    def _closing_lines(self, diagnosis: dict[str, Any] | None) -> Iterator[str]:
        """How even the ranks were, where files are, and what shows more of them."""
        if diagnosis:
            dimensions = [diagnosis["imbalance"][dimension] for dimension in ("tp", "cp", "pp", "dp")]
            predicted, measured = (math.prod(one[kind] for one in dimensions) for kind in ("predicted", "measured"))
            yield f"imbalance of ranks, slowest over mean: {predicted:.3f} predicted, {measured:.3f} measured"
        metrics, checkpoints = self._config.metrics.dir, self._config.checkpoint.dir
        yield f"metrics: {metrics}" + (f"; checkpoints: {checkpoints}" if checkpoints else "; no checkpoint.dir is set")
        yield next_command("report", metrics)

    def _look_at(self, rows: RankSteps, seconds: float) -> None:
        done, every = self._step - self._first, self._config.metrics.diagnose_every
        if done > 1 and not np.isnan(rows["compute_seconds"]).any():
            self._measured.append((self._step, rows, seconds))
            for line in self._watch.observe(rows):
                say(f"wlb: warning: {line}")
        self._measured = [measured for measured in self._measured if measured[0] > self._step - every]
        if done % every == 0:
            self._diagnose()

    def _diagnose(self) -> dict[str, Any] | None:
        """Write the diagnosis of the last steps, if any of them was measured."""
        if not self._measured:
            return None
        steps, rows, seconds = zip(*self._measured, strict=True)
        diagnosis = diagnose(
            rows,
            self._names,
            self._mesh_shape,
            self._micro_batches,
            last_step=steps[-1],
            step_seconds=float(np.mean(seconds)),
            straggler_factor=self._config.metrics.straggler_factor,
            pooled=self._job.pools is not None,
        )
        try:
            replace_text(self._diagnosis, json.dumps(diagnosis, allow_nan=False))
        except OSError as error:
            say(f"wlb: warning: {self._diagnosis} could not be written: {error.strerror}")
        return diagnosis

    def _store_tokens(self, plan: StepPlan) -> tuple[int, ...] | None:
        if not self._config.data.mixture:
            return None
        document, _, tokens = plan.table.T
        return self._store.tokens_by_store(document, tokens)

    def _startup(self, loader: StepLoader) -> Iterator[str]:
        config, job = self._config, self._job
        documents = number_of(len(self._store), "document")
        origin = f"resuming after step {self._first}" if self._first else "starting"
        processes = number_of(job.layout.world_size, f"{self._execution.device.type} process")
        pools, longest = "", f"{job.longest_micro_batch:,} tokens"
        if job.levels_steps:
            pools = f" with steps that are level over {job.layout.cp} ranks"
            longest = f"{-(-job.longest_micro_batch // job.layout.cp):,} tokens on each rank"
        elif job.pools:
            pools = f" with pool = {job.layout.cp} and pool_micro_batches = {job.micro_batches_per_rank}"
        yield f"{origin} on {processes}{pools}; {documents}; micro-batches of up to {longest}"
        if mixture := config.data.mixture:
            total = sum(config.data.weights)
            shares = ", ".join(f"{source_name(part.store)} {part.weight / total:.1%}" for part in mixture)
            yield f"mixture, by tokens: {shares}"
        if config.training.steps and self._first >= config.training.steps:
            yield f"wlb: note: all training.steps = {config.training.steps} are done; raise it to train on"
        else:
            yield LEGEND
        if loader.changed_data:
            yield f"wlb: warning: continuing on changed data: {loader.changed_data}"
        warnings = (
            dense_attention_warning(self._execution.dtype, self._execution.device),
            slow_attention_note(self._execution.device),
            tokenizer_warning(config.model, self._store),
            shared_store_warning(),
        )
        yield from filter(None, warnings)


def model_flops(shape: ModelShape, plan: StepPlan) -> float:
    """Operations that training on the step's segments takes, over all ranks."""
    lengths = [segment.length for segment in plan.segments]
    attention = float(attention_flops(shape, lengths, "forward").sum())
    return _PASSES * (attention + float(linear_flops(shape, plan.tokens, "forward")))


def peak_flops(hardware: str, device: torch.device) -> float:
    """FLOP/s of one rank on ``device`` at best, by the preset ``hardware``."""
    cores = torch.get_num_threads() if device.type == "cpu" else 1
    return hardware_preset(hardware).peak_flops * cores
