"""The loss on held-out documents, in every layout, from forward passes that change no training state.

Every document of ``evaluation.store`` is scored once, in micro-batches that are balanced by the job's own prices, the
same at every step. Ranks of the last stage sum the losses of tokens in float64, separately for every bucket of
documents of similar length; then all ranks add their sums. So the layout changes the result only by rounding.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import count, pairwise, takewhile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import record_function

from wlb.documents.store.reader import TokenStore
from wlb.job.config import EvaluationConfig
from wlb.job.job import Job
from wlb.packing.arrange import arrange
from wlb.packing.plan import MicroBatch
from wlb.packing.registry import make_packer
from wlb.runtime.batch import Batch
from wlb.runtime.collectives import gathered, gathered_rows
from wlb.runtime.loss import IGNORE_LABEL, token_losses
from wlb.runtime.own_lists import fsdp_units
from wlb.runtime.reading import read_batch
from wlb.training.preflight import held_out_segments
from wlb.training.rank_model import RankModel


class HeldOut:
    """The held-out documents of a job, packed by its prices into ``plans`` for the data-parallel ranks.

    ``buckets`` names ranges of document lengths that end at 256, 1,024, 4,096, ... tokens, up to the context window.
    Raises ``UserError`` if there is nothing to score.
    """

    def __init__(self, evaluation: EvaluationConfig, job: Job) -> None:
        assert evaluation.store is not None, "evaluating needs evaluation.store"
        self.store = TokenStore.open(evaluation.store)
        segments, window = held_out_segments(self.store, evaluation, job.data), job.context_window
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


class Evaluator:
    """Scores the held-out documents with this rank's ``model``; every rank of the job calls it alike."""

    def __init__(self, model: RankModel, recorded: int = 0) -> None:
        self._model = model
        self._held_out = HeldOut(model.checked.config.evaluation, model.checked.job)
        self._evaluated = gathered(recorded)[0]  # the step of the newest evaluation on record, as rank 0 knows it
        self.broken_off = False  # whether the last evaluation stopped early because a rank was asked to end

    def after(self, step: int, *, last: bool, asked_to_end: Callable[[], bool]) -> dict[str, Any] | None:
        """The result of ``run`` if one is due after ``step``, as after the ``last``; no step is evaluated twice."""
        due = last or step % self._model.checked.config.evaluation.every == 0
        if not due or step in (0, self._evaluated):
            return None
        with record_function("evaluation"):
            evaluation = self.run(asked_to_end)
        self._evaluated = step if evaluation else self._evaluated
        return evaluation

    def run(self, asked_to_end: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Score every document once; returns ``HeldOut.result``, the same on every rank, with this rank's seconds.

        None if ``asked_to_end`` becomes true on any rank before all are scored; all ranks stop together.
        """
        started, device = time.perf_counter(), self._model.execution.device
        sums = torch.zeros(2, len(self._held_out.buckets), dtype=torch.float64, device=device)  # losses, labels
        for plan in self._held_out.plans:
            self.broken_off = bool(gathered_rows([asked_to_end()], torch.int64, torch.device("cpu")).any())
            if self.broken_off:
                break
            for micro_batch in plan.ranks[self._model.share.dp_rank]:
                self._score(micro_batch, sums)
        for unit in (unit for stage in self._model.stages for unit in fsdp_units(stage)):
            unit.reshard()  # free the gathered weights; training gathers them again
        if self.broken_off:
            return None
        dist.all_reduce(sums)
        return self._held_out.result(*sums.tolist()) | {"seconds": time.perf_counter() - started}

    @torch.no_grad()
    def _score(self, micro_batch: MicroBatch, sums: Tensor) -> None:
        """Add the losses and the labels of this rank's tokens to ``sums``, shape (2, buckets)."""
        model, held_out = self._model, self._held_out
        whole = read_batch(micro_batch, held_out.store, model.checked.job.shape.vocab_size)
        batch = model.share.of(whole).to(sums.device)
        scores = self._forward(batch)
        if scores is None:
            return
        losses = token_losses(scores, batch.labels)
        if model.mesh.rank("tp") != 0:  # the others computed the same
            return
        assert batch.attention is not None
        mine = batch.attention.shard_plan.positions(model.share.cp_rank)
        buckets = torch.from_numpy(held_out.buckets_of(micro_batch)[mine]).to(sums.device)
        for of_buckets, values in zip(sums, (losses, batch.labels != IGNORE_LABEL), strict=True):
            of_buckets.index_add_(0, buckets, values[: len(mine)].double())

    def _forward(self, batch: Batch) -> Tensor | None:
        """The scores (T, V) of a micro-batch on ranks of the last stage, None elsewhere; a dealt head is their own.

        It runs one micro-batch at a time, because PyTorch's schedules hold the scores of a whole step.
        """
        group = self._model.mesh.group("pp")
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        for stage in self._model.stages:
            x = batch.tokens
            if not stage.is_first:
                shape = len(batch.tokens) // self._model.share.layout.tp, stage.config.shape.hidden
                x = torch.empty(shape, dtype=self._model.execution.dtype, device=x.device)
                dist.recv(x, group=group, group_src=(rank - 1) % ranks)
            out: Tensor = stage(x, batch.position_ids, batch.attention)
            if stage.is_last:
                return out if stage.ends_with_head else self._model.stages[0].scores(out)
            dist.send(out.contiguous(), group=group, group_dst=(rank + 1) % ranks)
        return None
