"""What a job shows of itself: rank 0 reports every step, and each rank can trace some.

Rank 0 writes ``steps.jsonl``, ``evaluation.jsonl`` and the files of TensorBoard. A file never holds a step twice: a
resumed job removes the lines after its checkpoint, reading only the end, and a new job renames an older file.
"""

import json
import os
from collections.abc import Iterator
from math import inf
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule, tensorboard_trace_handler

from wlb.job.config import MetricsConfig
from wlb.runtime.batch import Batch
from wlb.runtime.steps import RankStep
from wlb.terminal import next_command, number_of, tell
from wlb.training.environment import attention_note, hardware_name, tokenizer_warning
from wlb.training.parallel.parallelize import Execution
from wlb.training.preflight import CheckedJob
from wlb.training.process import TrainingError
from wlb.workload import hardware_preset
from wlb.workload.flops import model_flops

STEPS = "steps.jsonl"  # in metrics.dir
_STEPS_3_AND_4 = schedule(wait=1, warmup=1, active=2, repeat=1)  # of a run; starting the profiler slows step 2


def tracing(metrics: MetricsConfig, device: torch.device) -> profile:
    """The profiler around the steps of a rank; call its ``step`` after each.

    With ``metrics.profile`` it writes a Chrome trace of steps 3 and 4 of a run to ``metrics.dir``/trace, with the
    regions named by ``record_function``.
    """
    return profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])],
        schedule=_STEPS_3_AND_4 if metrics.profile else lambda step: ProfilerAction.NONE,
        on_trace_ready=tensorboard_trace_handler(f"{metrics.dir}/trace", f"rank-{dist.get_rank()}", use_gzip=True),
    )


class Reporter:
    """Reports, on rank 0 only, that a job continues after ``step``, and everything that follows.

    ``evaluated`` is the last step before that whose evaluation is on record.
    """

    def __init__(self, checked: CheckedJob, execution: Execution, step: int) -> None:
        self._checked, self._config, self._job = checked, checked.config, checked.job
        cores = torch.get_num_threads() if execution.device.type == "cpu" else 1  # a CPU's peak is for one core
        self._peak = hardware_preset(hardware_name(execution.device)).peak_flops * cores * self._job.layout.world_size
        self._files = MetricsFiles(self._config.metrics, step)
        self.evaluated, self._first = self._files.evaluated, step
        self._summary: dict[str, Any] = {"steps": 0, "tokens": 0, "documents": 0, "seconds": 0.0}
        self._summary |= dict.fromkeys(("last_step", "last_loss", "evaluation_loss"))
        self._unlabelled_reported = False
        self._greet(execution)

    def _greet(self, execution: Execution) -> None:
        config, job = self._config, self._job
        origin = f"resuming after step {self._first}" if self._first else "starting"
        processes = number_of(job.layout.world_size, f"{execution.device.type} process")
        sizes = ", ".join(f"{name} = {size}" for name, size in job.sizes.items())
        documents = number_of(len(self._checked.store), "document")
        longest = job.max_tokens // (job.layout.pool_size if job.levels_steps else 1)
        tell(f"{origin} on {processes}; {documents}; {sizes}; micro-batches of up to {longest:,} tokens")
        if config.training.calibrate and not (job.levels_steps and job.layout.tp == 1 == job.layout.ep):
            tell("wlb: note: training.calibrate needs level steps without tp and ep; it stays off here")
        if config.training.steps and self._first >= config.training.steps:
            tell(f"wlb: note: all training.steps = {config.training.steps} are done; raise it to train on")
        note = attention_note(execution.dtype, execution.device)
        for warning in filter(None, (note, tokenizer_warning(config.model, self._checked.store))):
            tell(warning)

    def record(
        self,
        step: int,
        loaded: RankStep[Batch],
        outcome: dict[str, float],
        computed: NDArray[np.float64],
        seconds: float,
    ) -> None:
        """Record a trained step (docs/training.md has the fields) with the ``outcome`` of ``train_step``.

        ``computed`` are the seconds that each rank computed, and ``seconds`` include waiting for data.
        """
        plan, planned, listed = loaded.plan, loaded.planned, self._config.metrics.document_ids
        row = {
            "step": step,
            **outcome,
            "step_seconds": seconds,
            "tokens": plan.tokens,
            "documents": len(planned.documents),
            "tokens_per_second": plan.tokens / seconds,
            "imbalance_degree": plan.imbalance,
            "token_delay": plan.delay_token_steps / plan.tokens,
            "data_wait_seconds": loaded.wait_seconds,
            "planning_seconds": planned.planning_seconds,
            "pending_documents": planned.pending_documents,
            "mfu": model_flops(self._job.shape, plan.table[:, 2]) / (seconds * self._peak),
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
        done = {"steps": 1, "tokens": plan.tokens, "documents": row["documents"], "seconds": seconds}
        self._summary |= {name: self._summary[name] + value for name, value in done.items()}
        self._summary |= {"last_step": step, "last_loss": outcome["loss"]}
        if loaded.loss_tokens == 0 and not self._unlabelled_reported:
            self._unlabelled_reported = True  # steps.jsonl has all further ones
            tell(
                f"wlb: warning: step {step} has no labelled token among its {plan.tokens:,}, so its loss and gradients "
                "are zero; look at the masks of its documents (metrics.document_ids)"
            )
        tell(live_line(row))

    def record_evaluation(self, step: int, evaluation: dict[str, Any]) -> None:
        """Record the result of ``Evaluator.run`` after ``step``."""
        self._files.write("evaluation", {"step": step} | evaluation)
        self._summary["evaluation_loss"] = evaluation["loss"]
        scored = {"loss": evaluation, **evaluation["buckets"]}
        shown = "  ".join(f"{name} {one['loss']:.4f}" for name, one in scored.items() if one["loss"] is not None)
        documents = number_of(evaluation["documents"], "document")
        tell(f"evaluation after step {step}  {documents}  {shown or 'loss nan'}  {evaluation['seconds']:.1f} s")

    def finish(self) -> dict[str, Any]:
        """Close the files, print the summary of this run and where its files are, and return the summary."""
        self._files.close()
        done, metrics, checkpoints = self._summary, self._config.metrics.dir, self._config.checkpoint.dir
        if done["steps"]:
            saved = f"checkpoints: {checkpoints}" if checkpoints else "no checkpoint.dir is set"
            tell(
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


class MetricsFiles:
    """The files of a job that continues after ``last_step`` (0: a new one). ``evaluated``: the last step evaluated."""

    def __init__(self, config: MetricsConfig, last_step: int) -> None:
        self._directory, self._tensorboard = config.dir, None
        config.dir.mkdir(parents=True, exist_ok=True)
        for path in (config.dir / STEPS, config.dir / "evaluation.jsonl"):
            self.evaluated = continue_file(path, last_step)
        (config.dir / STEPS).open("a").close()
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(config.dir), purge_step=last_step + 1)

    def write(self, file: Literal["steps", "evaluation"], row: dict[str, Any]) -> None:
        """Append the row of step ``row["step"]``. Raises ``TrainingError`` if that fails."""
        path = self._directory / f"{file}.jsonl"
        try:
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row, allow_nan=False) + "\n")
            if self._tensorboard is not None:
                for name, value in _scalars(row if file == "steps" else {file: row}):
                    self._tensorboard.add_scalar(name, value, row["step"])
        except OSError as error:
            why = f"metrics.dir {path} cannot be written: {error.strerror}"
            raise TrainingError(f"step {row['step']}: {why}") from error

    def close(self) -> None:
        """Flush and close the TensorBoard files."""
        if self._tensorboard is not None:
            self._tensorboard.close()


def _scalars(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row, with nested names joined by "/"; lists are not plotted."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield prefix + name, value


def continue_file(path: Path, last_step: int) -> int:
    """Make ``path`` end with ``last_step``, or rename it for a new job (0); returns the last step that it has, else 0.

    A line that a killed writer cut short is removed with the later ones.
    """
    if not path.exists() or not (size := path.stat().st_size):
        return 0
    if last_step == 0:
        aside = next(name for n in range(1, 10**6) if not (name := path.with_suffix(f".{n}.jsonl")).exists())
        os.replace(path, aside)
        tell(f"metrics of an earlier run are now in {aside}")
        return 0
    end, later, step = size, 0, inf
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        while end:
            start = content.rfind(b"\n", 0, end - 1) + 1
            if (step := _step_of(content[start:end])) <= last_step:
                break
            end, later = start, later + 1
    if later:
        os.truncate(path, end)
        tell(f"{path} goes back to step {last_step}, later lines removed: {later}")
    return int(step) if end else 0


def _step_of(line: bytes) -> float:
    """The step of a whole line, else infinity."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else inf
    except (ValueError, KeyError, TypeError):
        return inf
