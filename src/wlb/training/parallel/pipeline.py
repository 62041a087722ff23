"""Forward and backward of one optimizer step on this rank's stages.

``PipelineRunner`` is given this rank's share of its data-parallel rank's micro-batches, the same on every pipeline
rank. With one stage it runs them one after another; with several it hands them to PyTorch's 1F1B or interleaved 1F1B
schedule. Micro-batches that name their ranks differ in number from rank to rank. A rank then waits for others only
where it shares a micro-batch, when all weights are gathered at the start, and when gradients are reduced at the end.

The loss is the sum of cross entropy over labelled tokens divided by the labelled tokens of the whole step, over all
ranks, so that how documents are packed and sharded cannot change a gradient. Gradients are summed over micro-batches
and, once per step, over data- and context-parallel ranks; they are left in ``.grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from wlb.models.transformer import Transformer
from wlb.runtime.batch import IGNORE_LABEL
from wlb.runtime.sharded_batch import ShardedBatch
from wlb.runtime.stage import PlannedStage, make_schedule, run_schedule
from wlb.schedules.layout import Layout
from wlb.training.observe.compute_clock import ThreadClock
from wlb.training.parallel.mesh import JobMesh
from wlb.training.parallel.parallelize import Execution, master_dtype
from wlb.training.parallel.tied_embeddings import sum_tied_gradients


class LossTarget(NamedTuple):
    """What the loss of a micro-batch is computed from, beside the scores."""

    labels: Tensor
    loss_tokens: int
    micro_batch: int = 0


def token_loss(scores_TV: Tensor, target: LossTarget) -> Tensor:
    """Cross entropy summed over labelled tokens, in float32 or better, over the step's ``loss_tokens``.

    ``scores_TV`` may be split over tensor-parallel ranks by vocabulary; every one of them then gets the loss.
    """
    scores_TV = scores_TV.to(master_dtype(scores_TV.dtype))
    total = F.cross_entropy(scores_TV, target.labels, ignore_index=IGNORE_LABEL, reduction="sum")
    if isinstance(total, DTensor):
        total = total.to_local()
    return total / max(target.loss_tokens, 1)


class PipelineRunner:
    """Runs steps of ``micro_batches`` micro-batches per data-parallel rank on this rank's ``stage_modules``.

    ``Job`` has checked that the schedule can run so few. ``clock`` measures the compute of each step.
    """

    def __init__(
        self,
        stage_modules: Sequence[Transformer],
        layout: Layout,
        mesh: JobMesh,
        micro_batches: int,
        execution: Execution,
        clock: ThreadClock | None = None,
    ) -> None:
        self._clock = clock or ThreadClock()
        self._modules = stage_modules
        self._mesh = mesh
        self._device = execution.device
        self._loss_dtype = master_dtype(execution.dtype)
        self.losses: Sequence[Tensor] = ()  # of each micro-batch of the last step, on ranks of the last stage
        self._stages: list[PlannedStage] = []
        if layout.pp == 1:
            return
        self._stages = [
            PlannedStage(
                module,
                mesh.rank("pp") + chunk * layout.pp,
                layout.stages,
                hidden=module.config.shape.hidden,
                device=execution.device,
                dtype=execution.dtype,
                group=mesh.group("pp"),
                measuring=self._clock.measuring,
            )
            for chunk, module in enumerate(stage_modules)
        ]
        self._schedule = make_schedule(self._stages, micro_batches, self._loss)

    def run_step(self, batches: Sequence[ShardedBatch], loss_tokens: int) -> Tensor:
        """Run all micro-batches of this data-parallel rank forward and backward, from gradients that are zero.

        Args:
            batches: This rank's share of each, the same on every pipeline and tensor-parallel rank; as many as the
                runner was built for, or any number where they name their ranks (``RankShare.batches``).
            loss_tokens: Labelled tokens of the step over all ranks.

        Returns:
            This rank's share of the loss, detached: the sum over all ranks of the job is the mean loss of the step's
            labelled tokens.
        """
        batches = [batch.to(self._device) for batch in batches]
        targets = [LossTarget(batch.labels, loss_tokens, index) for index, batch in enumerate(batches)]
        keywords = [self._keywords(batch) for batch in batches]
        self._clock.begin_step(len(batches))
        with self._loss_context():
            if any(batch.ranks for batch in batches):
                # A rank that gathered a layer in a micro-batch of its own would wait there for one that waits for it in
                # a micro-batch that they share.
                self._gather_weights()
            if not self._stages:
                return self._run_alone([batch.tokens for batch in batches], keywords, targets)
            self._gather_weights()
            for stage in self._stages:
                stage.begin_step([batch.rows // self._mesh.size("tp") for batch in batches])
            losses = run_schedule(self._schedule, [batch.tokens for batch in batches], keywords, targets)
        sum_tied_gradients(self._modules, self._mesh.group("pp"))
        return self._sum(losses)

    def _gather_weights(self) -> None:
        """Start gathering all weights of this rank, which keeps them over the step.

        A pipeline stage has the time while its first micro-batch is on other stages. FSDP alone would gather a block at
        a time, as the forward comes to it.
        """
        for stage in self._modules:
            for unit in stage.modules():  # the stage comes first, then its blocks in their order
                if isinstance(unit, FSDPModule):
                    unit.unshard(async_op=True)

    def _run_alone(
        self, inputs: Sequence[Tensor], keywords: Sequence[dict[str, Any]], targets: Sequence[LossTarget]
    ) -> Tensor:
        (module,) = self._modules
        losses = []
        for index, (tokens, keyword, target) in enumerate(zip(inputs, keywords, targets, strict=True)):
            _reduce_gradients(module, index == len(inputs) - 1)
            with self._clock.measuring("forward", index):
                scores = module(tokens, **keyword)
            loss = self._loss(scores, target)
            del scores  # or a reference here would keep them through the backward
            with self._clock.measuring("backward", index):
                loss.backward()
            losses.append(loss.detach())
        return self._sum(losses)

    def _loss(self, scores_TV: Tensor, target: LossTarget) -> Tensor:
        with self._clock.measuring("loss", target.micro_batch):
            return token_loss(scores_TV, target)

    def _keywords(self, batch: ShardedBatch) -> dict[str, Any]:
        return {"positions_T": batch.positions, "attend": batch.attention(self._mesh.group("cp"))}

    def _loss_context(self) -> AbstractContextManager[None]:
        return loss_parallel() if self._mesh.size("tp") > 1 else nullcontext()

    def _sum(self, losses: Sequence[Tensor]) -> Tensor:
        self.losses = [loss.detach() for loss in losses]
        # A new tensor every time, also without losses: the caller may reduce it in place.
        total = torch.zeros((), dtype=self._loss_dtype, device=self._device)
        if self._mesh.rank("tp") == 0:  # the others computed the same
            for loss in self.losses:
                total += loss
        return total


def _reduce_gradients(module: Transformer, now: bool) -> None:
    """Let the next backward reduce gradients over the ranks that share the weights, or only add them up locally."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(now)
    module.set_is_last_backward(now)
    module.set_reshard_after_backward(now)
