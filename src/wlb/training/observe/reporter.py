"""Rank 0's reports: the start of a job, every step, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from wlb.documents.store.mixture import StoreMixture
from wlb.packing.plan import StepPlan
from wlb.training.data.loader import LoadedStep, StepLoader
from wlb.training.evaluation.held_out import Evaluation
from wlb.training.observe.imbalance import RankSteps
from wlb.training.observe.metrics import LEGEND, MetricsWriter, StepMetrics
from wlb.training.observe.observer import Observer
from wlb.training.observe.stragglers import RankName
from wlb.training.parallel.parallelize import Execution
from wlb.training.preflight import CheckedJob
from wlb.training.runtime.console import say
from wlb.training.runtime.environment import dense_attention_warning, shared_store_warning, tokenizer_warning

_OVERLONG = {"split": "split", "truncate": "truncated", "drop": "dropped", "error": "refused"}


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
        self._execution = execution
        self._step = step
        self._metrics = MetricsWriter(self._config.metrics, step, pooled=self._job.pools is not None)
        self._observer = Observer(self._config.metrics, self._job, names, execution.device)
        self.evaluated = self._metrics.evaluated

    def begin(self, loader: StepLoader) -> None:
        """Say where the job goes on and on what, and what its user should know of that."""
        for line in self._startup(loader):
            say(line)

    def record(self, step: int, loaded: LoadedStep, outcome: StepOutcome, rows: RankSteps) -> None:
        """Take in a step that was trained; ``rows`` are the seconds of all ranks."""
        if outcome.skipped:
            say(outcome.skipped)
        plan, planned, listed = loaded.plan, loaded.planned, self._config.metrics.document_ids
        observation = self._observer.observe(step, plan, rows, outcome.seconds)
        metrics = StepMetrics(
            step=step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            learning_rate=outcome.learning_rate,
            tokens=plan.tokens,
            documents=len(planned.documents),
            step_seconds=outcome.seconds,
            tokens_per_second=plan.tokens / outcome.seconds,
            imbalance_degree=plan.imbalance,
            token_delay=plan.delay_token_steps / plan.tokens,
            data_wait_seconds=loaded.wait_seconds,
            planning_seconds=planned.planning_seconds,
            pending_documents=planned.pending_documents,
            mfu=observation.mfu,
            imbalance=observation.imbalance,
            slow_ranks=observation.slow_ranks,
            document_ids=planned.documents if listed else None,
            segments=tuple(sorted(plan.segments)) if listed == "segments" else None,
            store_tokens=self._store_tokens(plan),
            loss_tokens=loaded.loss_tokens,
        )
        self._metrics.write(metrics)

    def record_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._metrics.write_evaluation(step, evaluation)

    def finish(self) -> dict[str, Any]:
        """Close the files, and print the diagnosis of the last steps; returns the summary of all steps."""
        self._metrics.close()
        self._observer.finish()
        return self._metrics.summary()

    def _store_tokens(self, plan: StepPlan) -> tuple[int, ...] | None:
        if not isinstance(self._store, StoreMixture):
            return None
        document, _, tokens = plan.table.T
        return self._store.tokens_by_store(document, tokens)

    def _startup(self, loader: StepLoader) -> Iterator[str]:
        config, job, data = self._config, self._job, loader.epoch_summary
        documents = f"{data.documents:,} documents"
        if data.empty:
            documents += f", {data.empty:,} empty ones passed over"
        if data.overlong:
            overlong = _OVERLONG[config.data.overlong]
            documents += f", {data.overlong:,} over {config.data.context_window:,} tokens {overlong}"
        origin = f"resuming after step {self._step}" if self._step else "starting"
        each = job.micro_batches_per_rank
        pools = f" with pool = {job.layout.cp} and pool_micro_batches = {each}" if job.pools else ""
        yield (
            f"{origin} on {job.layout.world_size} {self._execution.device.type} processes{pools}; {documents}; "
            f"micro-batches of up to {job.longest_micro_batch:,} tokens"
        )
        if mixture := config.data.mixture:
            total = sum(config.data.weights)
            shares = ", ".join(f"{part.store} {part.weight / total:.1%}" for part in mixture)
            yield f"mixture, by tokens: {shares}"
        if config.training.steps and self._step >= config.training.steps:
            yield f"wlb: note: all training.steps = {config.training.steps} are done; raise it to train on"
        else:
            yield LEGEND
        if loader.changed_data:
            yield f"wlb: warning: continuing on changed data: {loader.changed_data}"
        warnings = (
            dense_attention_warning(self._execution.dtype, self._execution.device),
            tokenizer_warning(config.model, self._store),
            shared_store_warning(),
        )
        yield from filter(None, warnings)
