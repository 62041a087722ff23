"""Forward and backward of one optimizer step on this rank's stages.

With one stage ``PipelineRunner`` runs micro-batches one after another. With several it follows the plan's operations,
or the layout's schedule if the plan has none. Routers add losses of their own to the gradients
(``wlb.models.experts``). Gradients accumulate over micro-batches and are summed over ranks once per step.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from wlb.models.experts import Routing
from wlb.models.transformer import Transformer
from wlb.runtime.batch import Batch
from wlb.runtime.calibration import Calibration
from wlb.runtime.clock import ComputeClock
from wlb.runtime.loss import packed_loss
from wlb.runtime.own_lists import run_batches
from wlb.runtime.stage import Pipeline, PlannedStage, pipeline, run_order
from wlb.schedules.layout import Layout
from wlb.schedules.operations import RankOperations
from wlb.training.parallel.mesh import JobMesh
from wlb.training.parallel.parallelize import Execution, master_dtype

_LOSS = partial(packed_loss, averaged_over=1, overwrite=True)


class PipelineRunner:
    """Runs steps of ``micro_batches`` micro-batches per data-parallel rank on this rank's ``stage_modules``.

    ``Job`` has checked that the schedule can run this many. ``clock`` measures the compute of each step, and
    ``calibration`` times micro-batches of level steps.
    """

    def __init__(
        self,
        stage_modules: Sequence[Transformer],
        layout: Layout,
        mesh: JobMesh,
        micro_batches: int,
        execution: Execution,
        calibration: Calibration | None = None,
    ) -> None:
        self.clock, self._calibration = ComputeClock(execution.device), calibration
        self._modules, self._layout, self._mesh, self._execution = stage_modules, layout, mesh, execution
        self.losses: Sequence[Tensor] = ()  # of each micro-batch of the last step, zero where others ran its head
        self.routed: Sequence[Routing] = ()  # in the micro-batches of the last step
        self._pipeline: Pipeline | None = None
        if layout.pp > 1:
            stages = [
                PlannedStage(
                    module,
                    mesh.rank("pp") + chunk * layout.pp,
                    layout.stages,
                    width=module.config.shape.hidden,
                    device=execution.device,
                    dtype=execution.dtype,
                    group=mesh.group("pp"),
                    measuring=self.clock.measuring,
                )
                for chunk, module in enumerate(stage_modules)
            ]

            def loss_fn(out: Tensor, target: tuple[Tensor, int]) -> Tensor:
                scores_TV = stage_modules[0].scores(out) if layout.deals_head else out
                return _LOSS(scores_TV, *target)

            self._pipeline = pipeline(stages, micro_batches, loss_fn, deals_head=layout.deals_head)

    def run_step(
        self,
        batches: Sequence[Batch],
        loss_tokens: int,
        operations: Sequence[RankOperations] = (),
        router_losses: tuple[float, float] = (0.0, 0.0),
    ) -> Tensor:
        """Run all micro-batches of this data-parallel rank forward and backward; gradients must be zero before.

        ``batches`` are this rank's share of each, the same on every pipeline and tensor-parallel rank; as many as the
        runner was built for, or any number where they name their ranks (``own_batches``). ``loss_tokens`` counts the
        labelled tokens of the step over all ranks; ``operations`` are those of its ``StepPlan``. ``router_losses``
        weigh the balance loss and the z-loss of a token. Returns this rank's share of the cross entropy, detached:
        summed over all ranks, the mean of the step's labelled tokens.
        """
        batches, loss_tokens = [batch.to(self._execution.device) for batch in batches], max(loss_tokens, 1)
        self.routed = [Routing(batch.own_tokens, *router_losses) for batch in batches]
        if self._pipeline is None:
            (module,), kept = self._modules, self._layout.keeps_weights

            def loss_of(batch: Batch) -> Tensor:
                return _LOSS(module(batch.tokens, **_keywords(batch, next(routings))), batch.labels, loss_tokens)

            routings = iter(self.routed)
            how: dict[str, Any] = {"calibration": self._calibration, "measuring": self.clock.measuring}
            losses = run_batches(module, batches, loss_of, keep_weights=kept, **how)
        else:
            mine = operations[self._mesh.rank("dp")] if operations else self._layout.operations(len(batches))
            rows = [len(batch.tokens) // self._layout.tp for batch in batches]
            targets = [(batch.labels, loss_tokens) for batch in batches]
            keywords = [*map(_keywords, batches, self.routed)]
            inputs = [batch.tokens for batch in batches], rows, keywords, targets
            losses = run_order(self._pipeline, mine, *inputs)
            sum_copied_gradients(self._modules, self._mesh)
        self.losses = [loss.detach() for loss in losses]
        # A new tensor every time, even without losses, because the caller may reduce it in place.
        nothing = torch.zeros((), dtype=master_dtype(self._execution.dtype), device=self._execution.device)
        return sum(self.losses, nothing) if self._mesh.rank("tp") == 0 else nothing  # the others computed the same


def _keywords(batch: Batch, routing: Routing) -> dict[str, Any]:
    attend = batch.attention and batch.attention.of_one_stage()
    return {"positions_T": batch.position_ids, "attend": attend, "routing": routing}


def sum_copied_gradients(stages: Sequence[Transformer], mesh: JobMesh) -> None:
    """Sum the gradients of weights that several pipeline ranks hold over their copies.

    Those are a dealt head, and a tied embedding: with a dealt head on all ranks, and else on the first and last stage.
    Copies start equal, because initial values follow from the name. Each has the gradient of its own use, and all get
    the sum, as in Megatron-LM, so they stay equal to the last bit. All ranks call this when gradients are complete.
    """
    for stage in stages:
        if stage.head is not None and stage.dealt_heads:
            for of_head in stage.head.parameters():
                _sum(of_head, mesh.heads)
        for tied in stage.tied_VD if stage.dealt_heads is not None or stage.is_first != stage.is_last else ():
            _sum(tied, mesh.group("pp"), ends_only=stage.dealt_heads is None)


def _sum(weight: Tensor, group: dist.ProcessGroup | None, *, ends_only: bool = False) -> None:
    """Sum the gradient of ``weight`` over ``group``, or over its first and last rank."""
    mine = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
    if mine is None or mine.numel() == 0:  # the other copies are sharded alike
        return
    if ends_only:
        _add_other_end(mine, group)
    else:
        dist.all_reduce(mine, group=group)


def _add_other_end(mine: Tensor, group: dist.ProcessGroup | None) -> None:
    """Add up the tensors of the first and the last rank of ``group``, which both call this."""
    last = dist.get_world_size(group) - 1
    peer = last - dist.get_rank(group)
    others = torch.empty_like(mine, memory_format=torch.contiguous_format)
    operations = [
        dist.P2POp(dist.isend, mine.contiguous(), group=group, group_peer=peer),
        dist.P2POp(dist.irecv, others, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    mine += others
