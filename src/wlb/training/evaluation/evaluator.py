"""The loss on held-out documents, in every layout, from forward passes that change no training state.

Ranks of the last stage sum the losses of tokens in float64, separately for every bucket of documents of similar length
(``held_out``); then all ranks add their sums. So the layout changes the result only by rounding.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from wlb.packing.plan import MicroBatch
from wlb.runtime.batch import Batch
from wlb.runtime.collectives import gathered, gathered_rows
from wlb.runtime.loss import IGNORE_LABEL, token_losses
from wlb.runtime.own_lists import fsdp_units
from wlb.runtime.reading import read_batch
from wlb.training.evaluation.held_out import HeldOut
from wlb.training.rank_model import RankModel


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
        mesh = self._model.mesh
        group = mesh.group("pp")
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
