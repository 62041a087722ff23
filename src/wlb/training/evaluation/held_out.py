"""The held-out documents that an evaluation scores, their micro-batches, and the report of their losses.

Every document of ``evaluation.store`` is scored once. Documents longer than the context window are cut as in training.
Micro-batches are balanced by the job's own prices, the same at every step. Documents of similar length share a bucket.
"""

import math
from collections.abc import Sequence
from itertools import count, pairwise, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents.order import check_trainable
from wlb.documents.segments import split_overlong
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.job.config import DataConfig, EvaluationConfig
from wlb.job.job import Job
from wlb.packing.arrange import arrange
from wlb.packing.plan import MicroBatch
from wlb.packing.registry import make_packer
from wlb.runtime.reading import labels_of_segments


class HeldOut:
    """The held-out documents of a job, packed by its prices into ``plans`` for the data-parallel ranks.

    ``buckets`` names ranges of document lengths that end at 256, 1,024, 4,096, ... tokens, up to the context window.
    Raises ``UserError`` if there is nothing to score.
    """

    def __init__(self, evaluation: EvaluationConfig, job: Job) -> None:
        assert evaluation.store is not None, "evaluating needs evaluation.store"
        self.store = TokenStore.open(evaluation.store)
        segments, window = _segments(self.store, evaluation, job.data), job.context_window
        packed_by: dict[str, Any] = {"micro_batches": job.step_micro_batches, "workload": job.packing_prices}
        packer = make_packer("fixed_greedy", context_window=window, **packed_by)
        self.plans = [arrange(p, job.layout.pools, order="arrival") for p in packer.plan(segments) + packer.drain()]
        self._boundaries = [256, *takewhile(lambda length: length <= window, (4**power for power in count(5)))]
        self.buckets = [f"{start}-{stop - 1}" for start, stop in pairwise([1, *self._boundaries])]
        self.buckets.append(f"{self._boundaries[-1]}+")

    def buckets_of(self, micro_batch: MicroBatch) -> NDArray[np.int64]:
        """The bucket of every token of a micro-batch, (tokens,); a micro-batch without segments has one token."""
        documents = np.array([segment.document for segment in micro_batch.segments], np.int64)
        if not len(documents):
            return np.zeros(1, np.int64)
        buckets = np.searchsorted(self._boundaries, self.store.lengths_of(documents), side="right")
        return np.repeat(buckets, micro_batch.lengths)

    def result(self, losses: Sequence[float], labels: Sequence[float]) -> dict[str, Any]:
        """The row of evaluation.jsonl from summed ``losses`` and numbers of ``labels`` per bucket; no mean is None."""
        sums = zip([math.fsum(losses), *losses], [sum(labels), *labels], strict=True)
        means = [{"loss": s / n if n and math.isfinite(s) else None, "tokens": int(n)} for s, n in sums]
        documents = {segment.document for plan in self.plans for segment in plan.segments}
        of_buckets = dict(zip(self.buckets, means[1:], strict=True))
        return means[0] | {"documents": len(documents), "buckets": of_buckets}


def check_evaluation(evaluation: EvaluationConfig, data: DataConfig, trained: TokenStore, vocab_size: int) -> None:
    """Raise ``UserError`` for documents that a model of ``vocab_size``, trained on ``trained``, cannot score."""
    if evaluation.store is None:
        return
    store = TokenStore.open(evaluation.store)
    if store.vocab_size is not None and store.vocab_size > vocab_size:
        raise UserError(
            f"evaluation.store {store.prefix} has a vocabulary of {store.vocab_size}, but the model has {vocab_size}; "
            "prepare both stores with the same tokenizer"
        )
    if store.tokenizer and trained.tokenizer and store.tokenizer_identity != trained.tokenizer_identity:
        raise UserError(
            f"evaluation.store {store.prefix} was prepared with another tokenizer than {trained.prefix} of [data]; "
            "prepare both with the same"
        )
    if not labels_of_segments(_segments(store, evaluation, data), store).any():
        raise UserError(f"evaluation.store {store.prefix} has no labels, so it has no loss; prepare it again")


def _segments(store: TokenStore, evaluation: EvaluationConfig, data: DataConfig) -> NDArray[np.int64]:
    lengths = store.lengths_of(np.arange(min(len(store), evaluation.documents or len(store))))
    check_trainable(lengths, data.changed(store=evaluation.store, mixture=()))
    whole = np.stack([np.arange(len(lengths)), np.zeros_like(lengths), lengths], axis=1)[lengths > 0]
    return split_overlong(whole, data.context_window, data.overlong)[0]
