"""Which held-out documents an evaluation scores, in which micro-batches, and what is reported of their losses.

Every document of ``evaluation.store`` comes once, cut as in training where it is longer than the context window, in
micro-batches that are even by the job's own prices: the same at every step. Documents of similar length share a bucket.
How many labelled tokens a bucket has follows from the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.order import check_trainable
from wlb.documents.segments import Segment, split_overlong
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.job.config import DataConfig, EvaluationConfig
from wlb.job.job import Job
from wlb.packing.arrange import arrange
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.packing.registry import make_packer
from wlb.runtime.batch import check_first_tokens, labels_of_segments
from wlb.terminal import number_of

_FIRST_BOUNDARY, _BOUNDARY_RATIO = 256, 4


@dataclass(frozen=True)
class BucketLoss:
    """Documents of ``start`` to ``stop - 1`` tokens (None: no upper limit), their labelled tokens and mean loss."""

    start: int
    stop: int | None
    documents: int
    tokens: int
    loss: float

    @property
    def name(self) -> str:
        return f"{self.start}-{self.stop - 1}" if self.stop else f"{self.start}+"


@dataclass(frozen=True)
class Evaluation:
    """One pass over the held-out documents; ``loss`` is the mean over their labelled tokens."""

    loss: float
    tokens: int
    documents: int
    buckets: tuple[BucketLoss, ...]
    seconds: float

    def to_json(self, step: int) -> dict[str, Any]:
        """One line of evaluation.jsonl; a loss that is no number, or of no tokens, is null."""
        return {
            "step": step,
            "loss": _finite(self.loss),
            "tokens": self.tokens,
            "documents": self.documents,
            "buckets": [
                {"from": b.start, "to": b.stop, "documents": b.documents, "tokens": b.tokens, "loss": _finite(b.loss)}
                for b in self.buckets
            ],
            "seconds": self.seconds,
        }

    def line(self, step: int) -> str:
        """The result for the console."""
        buckets = "  ".join(f"{b.name}: {b.loss:.4f}" for b in self.buckets if b.tokens)
        return (
            f"evaluation after step {step}  loss {self.loss:.4f}  {number_of(self.documents, 'document')}  {buckets}  "
            f"{self.seconds:.1f} s"
        )


class HeldOut:
    """The held-out documents of a job, packed by its prices; ``plans`` are dealt to data-parallel ranks.

    Raises ``UserError`` where there is nothing to score.
    """

    def __init__(self, evaluation: EvaluationConfig, job: Job) -> None:
        assert evaluation.store is not None, "evaluating needs evaluation.store"
        self.store = TokenStore.open(evaluation.store)
        segments = _segments(self.store, evaluation, job.data)
        self.plans = [arrange(plan, job.layout.dp, order="arrival") for plan in _pack(segments, job)]
        self._boundaries = bucket_boundaries(evaluation, job.context_window)
        lengths = _lengths(self.store, evaluation)
        self._bucket: NDArray[np.int64] = np.searchsorted(self._boundaries, lengths, side="right")
        documents = np.array([segment.document for segment in segments])
        labelled = labels_of_segments(segments, self.store)
        self._tokens = np.bincount(self._bucket[documents], labelled, self.buckets).astype(np.int64).tolist()
        self._documents = np.bincount(self._bucket[np.unique(documents)], minlength=self.buckets).tolist()

    @property
    def buckets(self) -> int:
        return len(self._boundaries) + 1

    def buckets_of(self, micro_batch: MicroBatch) -> NDArray[np.int64]:
        """The bucket of every token of a micro-batch, (tokens,); of the one token of a micro-batch without segments."""
        if not micro_batch.segments:
            return np.zeros(1, np.int64)
        documents = [segment.document for segment in micro_batch.segments]
        return np.repeat(self._bucket[documents], micro_batch.lengths)

    def result(self, sums: Sequence[float], seconds: float) -> Evaluation:
        """``sums`` are losses by bucket, added up over tokens."""
        limits = [1, *self._boundaries, None]
        rows = zip(pairwise(limits), self._documents, self._tokens, sums, strict=True)
        return Evaluation(
            loss=_mean(math.fsum(sums), sum(self._tokens)),
            tokens=sum(self._tokens),
            documents=sum(self._documents),
            buckets=tuple(
                BucketLoss(start or 1, stop, documents, tokens, _mean(total, tokens))
                for (start, stop), documents, tokens, total in rows
            ),
            seconds=seconds,
        )


def check_evaluation(evaluation: EvaluationConfig, data: DataConfig, trained: TokenStore, vocab_size: int) -> None:
    """Raise ``UserError`` for held-out documents that cannot be scored by a model of ``vocab_size`` tokens.

    ``trained`` is the store that the job trains on.
    """
    if evaluation.store is None:
        return
    store = TokenStore.open(evaluation.store)
    if store.vocab_size is not None and store.vocab_size > vocab_size:
        raise UserError(
            f"evaluation.store {store.prefix} has a vocabulary of {store.vocab_size}, the model one of {vocab_size}; "
            "prepare both stores with the same tokenizer"
        )
    if store.tokenizer and trained.tokenizer and store.tokenizer_identity != trained.tokenizer_identity:
        raise UserError(
            f"evaluation.store {store.prefix} was prepared with another tokenizer than {trained.prefix} of [data]; "
            "prepare both with the same"
        )
    check_first_tokens(store, vocab_size)
    if not labels_of_segments(_segments(store, evaluation, data), store).any():
        raise UserError(f"evaluation.store {store.prefix} has no label, so there is no loss to take; prepare it again")


def bucket_boundaries(evaluation: EvaluationConfig, context_window: int) -> list[int]:
    """Document lengths at which a bucket ends and the next begins: by default 256, 1,024, ... up to the window."""
    if evaluation.length_buckets != "auto":
        return list(evaluation.length_buckets)
    boundaries = [_FIRST_BOUNDARY]
    while boundaries[-1] * _BOUNDARY_RATIO <= context_window:
        boundaries.append(boundaries[-1] * _BOUNDARY_RATIO)
    return boundaries


def _lengths(store: TokenStore, evaluation: EvaluationConfig) -> NDArray[np.int64]:
    return store.lengths_of(np.arange(min(len(store), evaluation.documents or len(store))))


def _segments(store: TokenStore, evaluation: EvaluationConfig, data: DataConfig) -> list[Segment]:
    lengths = _lengths(store, evaluation)
    check_trainable(lengths, data.changed(store=evaluation.store, mixture=()))
    whole = [Segment(document, 0, length) for document, length in enumerate(lengths.tolist()) if length]
    return split_overlong(whole, data.context_window, data.overlong)[0]


def _pack(segments: Sequence[Segment], job: Job) -> list[StepPlan]:
    """Even micro-batches of at most a context window; nothing waits long, as all documents are there at once."""
    packer = make_packer(
        "fixed_greedy",
        micro_batches=job.packing.micro_batches,
        context_window=job.context_window,
        workload=job.packing_prices,
    )
    return packer.plan(segments) + packer.drain()


def _mean(total: float, tokens: int) -> float:
    return total / tokens if tokens else math.nan


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
