"""The loss on held-out documents, in every layout, by forward passes that change no training state.

Losses of single tokens are added up in float64 on the ranks of the last stage, one sum for every bucket of documents of
similar length (``held_out``), then over all ranks. So the result depends on the layout by rounding only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from wlb.attention.profiler_regions import region
from wlb.job.config import EvaluationConfig
from wlb.job.job import Job
from wlb.models.transformer import Attend, Transformer
from wlb.packing.plan import MicroBatch
from wlb.runtime.batch import IGNORE_LABEL, read_batch
from wlb.runtime.collectives import gathered, gathered_rows
from wlb.runtime.sharded_batch import RankShare, ShardedBatch
from wlb.training.evaluation.held_out import Evaluation, HeldOut
from wlb.training.parallel.mesh import JobMesh
from wlb.training.parallel.parallelize import Execution, master_dtype


class Evaluator:
    """Scores the held-out documents with this rank's ``stages``; every rank of the job calls it alike.

    ``share`` is what this rank takes of a step, as in training. ``recorded`` is the step of the newest evaluation on
    record, as rank 0 knows it.
    """

    def __init__(
        self,
        evaluation: EvaluationConfig,
        job: Job,
        stages: Sequence[Transformer],
        mesh: JobMesh,
        share: RankShare,
        execution: Execution,
        recorded: int = 0,
    ) -> None:
        self._held_out = HeldOut(evaluation, job)
        self._every = evaluation.every
        self._evaluated = gathered(recorded)[0]
        self.broken_off = False  # the last evaluation, as a rank was asked to end
        self._vocab_size = job.shape.vocab_size
        self._forward = _ForwardOnly(stages, mesh.group("pp"), execution.dtype)
        self._mesh = mesh
        self._share = share
        self._loss_dtype = master_dtype(execution.dtype)
        self._device = execution.device

    def after(self, step: int, *, last: bool, asked_to_end: Callable[[], bool]) -> Evaluation | None:
        """What ``run`` finds, where an evaluation after ``step`` is due: at the ``last`` one too, and no step twice."""
        due = step > 0 and (last or step % self._every == 0)
        if not due or step == self._evaluated:
            return None
        with region("evaluation"):
            evaluation = self.run(asked_to_end)
        if evaluation is not None:
            self._evaluated = step
        return evaluation

    def run(self, asked_to_end: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Score every document once; the same result on every rank, but for its own seconds.

        None where ``asked_to_end`` becomes true on a rank before all are scored: they stop together.
        """
        started = time.perf_counter()
        sums = torch.zeros(self._held_out.buckets, dtype=torch.float64, device=self._device)
        for plan in self._held_out.plans:
            self.broken_off = bool(gathered_rows([asked_to_end()], torch.int64, self._device).any())
            if self.broken_off:
                self._forward.release()
                return None
            for micro_batch in plan.ranks[self._share.dp_rank]:
                self._add_losses(micro_batch, sums)
        self._forward.release()
        dist.all_reduce(sums)
        return self._held_out.result(sums.tolist(), time.perf_counter() - started)

    def _add_losses(self, micro_batch: MicroBatch, sums: Tensor) -> None:
        whole = read_batch(micro_batch, self._held_out.store, self._vocab_size)
        batch = self._share.of(whole).to(self._device)
        scores = self._scores(batch)
        if scores is None:
            return
        losses = self._token_losses(scores, batch.labels)[: batch.local_tokens]
        if self._mesh.rank("tp") != 0:  # the others computed the same
            return
        mine = batch.shard_plan.positions(self._share.cp_rank)
        buckets = torch.from_numpy(self._held_out.buckets_of(micro_batch)[mine]).to(self._device)
        for bucket in buckets.unique().tolist():
            sums[bucket] += losses[buckets == bucket].sum(dtype=torch.float64)

    def _scores(self, batch: ShardedBatch) -> Tensor | None:
        attend = batch.attention(self._mesh.group("cp"))
        return self._forward(batch.tokens, batch.positions, attend, batch.rows // self._mesh.size("tp"))

    @torch.no_grad()
    def _token_losses(self, scores_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Cross entropy of every token, zero where it has no label; ``scores_TV`` may be split by vocabulary."""
        with loss_parallel() if isinstance(scores_TV, DTensor) else nullcontext():
            scores_TV = scores_TV.to(self._loss_dtype)
            losses = F.cross_entropy(scores_TV, labels_T, ignore_index=IGNORE_LABEL, reduction="none")
        return losses.to_local() if isinstance(losses, DTensor) else losses


class _ForwardOnly:
    """One micro-batch forward through all pipeline stages; every rank of ``group``, the pipeline ranks in order.

    PyTorch's schedules exist for training; a forward pass alone is short enough to write down. The rows of the residual
    stream follow from the micro-batch, as in training, so nothing but the stream itself is sent. Stages run in their
    order, one micro-batch at a time: ranks that follow each other overlap, the chunks of an interleaved schedule on one
    rank do not, and sends and receives of two ranks always match in order.
    """

    def __init__(self, stages: Sequence[Transformer], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self._stages = stages
        self._group = group
        self._dtype = dtype

    @torch.no_grad()
    def __call__(self, tokens: Tensor, positions_T: Tensor, attend: Attend, stream_rows: int) -> Tensor | None:
        """Scores (T, V) on the ranks of the last stage, None elsewhere.

        ``stream_rows`` is what a rank holds of the residual stream: T, or with tensor parallelism its part.
        """
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        for stage in self._stages:
            x = tokens
            if not stage.is_first:
                x = torch.empty(stream_rows, stage.config.shape.hidden, dtype=self._dtype, device=tokens.device)
                dist.recv(x, group=self._group, group_src=(rank - 1) % ranks)
            out: Tensor = stage(x, positions_T, attend)
            if stage.is_last:
                return out
            dist.send(out.contiguous(), group=self._group, group_dst=(rank + 1) % ranks)
        return None

    def release(self) -> None:
        """Free the weights that FSDP has gathered; training gathers them anew."""
        for stage in self._stages:
            for unit in stage.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()
