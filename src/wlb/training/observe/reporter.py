"""Rank 0's reports: the start of a job, every step, every evaluation, and the summary."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from wlb.terminal import next_command, number_of
from wlb.training.console import say
from wlb.training.data.loader import LoadedStep
from wlb.training.environment import attention_note, hardware_name, tokenizer_warning
from wlb.training.observe.metrics import MetricsFiles
from wlb.training.parallel.parallelize import Execution
from wlb.training.preflight import CheckedJob
from wlb.workload import hardware_preset
from wlb.workload.flops import model_flops


class StepOutcome(NamedTuple):
    """The result of a step; the seconds include waiting for data."""

    loss: float
    grad_norm: float
    learning_rate: float
    step_seconds: float = 0.0


class Reporter:
    """Reports, on rank 0 only, that a job continues after ``step``, and everything that follows.

    ``evaluated`` is the last step before that whose evaluation is on record.
    """

    def __init__(self, checked: CheckedJob, execution: Execution, step: int) -> None:
        self._checked, self._config, self._job = checked, checked.config, checked.job
        self._execution = execution
        cores = torch.get_num_threads() if execution.device.type == "cpu" else 1  # a CPU's peak is for one core
        self._peak = hardware_preset(hardware_name(execution.device)).peak_flops * cores * self._job.layout.world_size
        self._files = MetricsFiles(self._config.metrics, step)
        self.evaluated, self._first = self._files.evaluated, step
        self._summary: dict[str, Any] = {"steps": 0, "tokens": 0, "documents": 0, "seconds": 0.0}
        self._summary |= dict.fromkeys(("last_step", "last_loss", "evaluation_loss"))
        self._unlabelled_reported = False
        self._greet()

    def _greet(self) -> None:
        config, execution = self._config, self._execution
        origin = f"resuming after step {self._first}" if self._first else "starting"
        processes = number_of(self._job.layout.world_size, f"{execution.device.type} process")
        sizes = ", ".join(f"{name} = {size}" for name, size in self._job.sizes.items())
        documents = number_of(len(self._checked.store), "document")
        longest = self._job.max_tokens // (self._job.layout.cp if self._job.levels_steps else 1)
        say(f"{origin} on {processes}; {documents}; {sizes}; micro-batches of up to {longest:,} tokens")
        if config.training.calibrate and not (self._job.levels_steps and self._job.layout.tp == 1):
            say("wlb: note: training.calibrate needs level steps without tensor parallelism; it stays off here")
        if config.training.steps and self._first >= config.training.steps:
            say(f"wlb: note: all training.steps = {config.training.steps} are done; raise it to train on")
        note = attention_note(execution.dtype, execution.device)
        for warning in filter(None, (note, tokenizer_warning(config.model, self._checked.store))):
            say(warning)

    def record(self, step: int, loaded: LoadedStep, outcome: StepOutcome, computed: NDArray[np.float64]) -> None:
        """Record a trained step (docs/training.md has the fields); ``computed`` has the seconds of every rank."""
        plan, planned, listed = loaded.plan, loaded.planned, self._config.metrics.document_ids
        row = {
            "step": step,
            **outcome._asdict(),
            "tokens": plan.tokens,
            "documents": len(planned.documents),
            "tokens_per_second": plan.tokens / outcome.step_seconds,
            "imbalance_degree": plan.imbalance,
            "token_delay": plan.delay_token_steps / plan.tokens,
            "data_wait_seconds": loaded.wait_seconds,
            "planning_seconds": planned.planning_seconds,
            "pending_documents": planned.pending_documents,
            "mfu": model_flops(self._job.shape, plan.table[:, 2]) / (outcome.step_seconds * self._peak),
            "slowest_rank": {"predicted": plan.slowest_rank, "measured": float(computed.max() / computed.mean())},
            "rank_seconds": [round(seconds, 6) for seconds in computed.tolist()],
            "loss_tokens": loaded.loss_tokens,
        }
        if listed:
            row["document_ids"] = planned.documents
        if listed == "segments":
            row["segments"] = sorted(plan.segments)
        if self._config.data.mixture:
            document, _, tokens = plan.table.T
            row["store_tokens"] = self._checked.store.tokens_by_store(document, tokens)
        self._files.write("steps", row)
        done = {"steps": 1, "tokens": plan.tokens, "documents": row["documents"], "seconds": outcome.step_seconds}
        self._summary |= {name: self._summary[name] + value for name, value in done.items()}
        self._summary |= {"last_step": step, "last_loss": outcome.loss}
        if loaded.loss_tokens == 0 and not self._unlabelled_reported:
            self._unlabelled_reported = True  # steps.jsonl has all further ones
            say(
                f"wlb: warning: step {step} has no labelled token among its {plan.tokens:,}, so its loss and gradients "
                "are zero; look at the masks of its documents (metrics.document_ids)"
            )
        say(live_line(row))

    def record_evaluation(self, step: int, evaluation: dict[str, Any]) -> None:
        """Record the result of ``Evaluator.run`` after ``step``."""
        self._files.write("evaluation", {"step": step} | evaluation)
        self._summary["evaluation_loss"] = evaluation["loss"]
        scored = {"loss": evaluation, **evaluation["buckets"]}
        shown = "  ".join(f"{name} {one['loss']:.4f}" for name, one in scored.items() if one["loss"] is not None)
        documents = number_of(evaluation["documents"], "document")
        say(f"evaluation after step {step}  {documents}  {shown or 'loss nan'}  {evaluation['seconds']:.1f} s")

    def finish(self) -> dict[str, Any]:
        """Close the files, print the summary of this run and where its files are, and return the summary."""
        self._files.close()
        done, metrics, checkpoints = self._summary, self._config.metrics.dir, self._config.checkpoint.dir
        if done["steps"]:
            saved = f"checkpoints: {checkpoints}" if checkpoints else "no checkpoint.dir is set"
            say(
                f"trained to step {done['last_step']}: {done['tokens']:,} tokens in {done['seconds']:,.1f} s, "
                f"{done['tokens'] / done['seconds']:,.0f} tokens/s; loss {done['last_loss']:.4f}\n"
                f"metrics: {metrics}; {saved}\n{next_command('report', metrics)}"
            )
        return done


def live_line(row: dict[str, Any]) -> str:
    """A step in one line; "slowest rank" is predicted/measured compute of the slowest rank over the mean rank."""
    slowest = "/".join(f"{factor:.2f}" for factor in row["slowest_rank"].values())
    return (
        f"step {row['step']}  loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s  "
        f"{row['step_seconds']:.2f} s  imbalance {row['imbalance_degree']:.3f}  delay {row['token_delay']:.2f}  "
        f"mfu {row['mfu']:.1%}  data wait {row['data_wait_seconds'] / row['step_seconds']:.0%}  "
        f"{row['pending_documents']} pending  slowest rank {slowest}"
    )
