"""Micro-batches of different lengths on PyTorch's pipeline schedules, without exchanging shapes.

The stock ``PipelineStage`` learns one shape and allocates all its receive buffers for it. Every rank knows
the plan of the step, though, and with it the tokens of each micro-batch. ``PlannedStage`` therefore makes
each buffer when the schedule asks for the receive, in the size of that micro-batch, and forgets it when the
schedule takes the data. It is constructed once and never re-initialised, which would clear accumulated
gradients (NeMo Automodel #3530).

This is the only file that touches private parts of ``torch.distributed.pipelining``. It relies on the following in
torch 2.11 to 2.14: a stage that is given example inputs and outputs infers no shapes at run time; schedules get what
was received through the two ``_retrieve_recv_*`` methods, run micro-batches through the two ``*_one_chunk`` methods,
and take lists of them in ``_step_microbatches``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from wlb.attention.slices import KeptSlices
from wlb.runtime.own_lists import gather_weights

Measuring = Callable[[str, int], AbstractContextManager[object]]  # of (phase, micro-batch)


class PlannedStage(PipelineStage):
    """A stage that passes a residual stream (rows, width) of known rows per micro-batch; see ``variable_length_stage``.

    ``example`` is one row of the stream, ``measuring`` a context for each forward and backward.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        stages: int,
        example: Tensor,
        group: dist.ProcessGroup | None,
        measuring: Measuring,
    ) -> None:
        inputs = example if stage else torch.empty(1, dtype=torch.int64, device=example.device)
        super().__init__(module, stage, stages, example.device, input_args=inputs, output_args=example, group=group)
        self._measuring = measuring
        self._stream = example.detach()
        self._token_counts: Sequence[int] = ()
        self._kept_slices = KeptSlices()
        self._activations: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        # Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch 2.13 would hold every tensor against the example.
        self._runtime_validate = False

    def begin_step(self, token_counts: Sequence[int]) -> None:
        """Announce the tokens of each micro-batch of the step to come."""
        self._token_counts = token_counts
        self._kept_slices = KeptSlices()
        self.has_backward = True
        self.clear_runtime_states()

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *rest: Any, **more: Any
    ) -> Any:
        kwargs = kwargs or {}
        if "attend" in kwargs:
            kwargs = kwargs | {"attend": kwargs["attend"].of_one_stage(self._kept_slices)}
        with self._measuring("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, *rest, **more)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        with self._measuring("backward", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        if loss is not None:
            loss.detach_()  # the schedule keeps it to the end of the step, and its graph would keep what was received

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        return self._receive(self._activations, fwd_chunk_id, self.stage_index - 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        return self._receive(self._gradients, bwd_chunk_id, self.stage_index + 1)

    def _receive(self, buffers: dict[int, Tensor], micro_batch: int, sender: int) -> list[dist.P2POp]:
        buffer = self._stream.new_empty(self._token_counts[micro_batch], self._stream.shape[1])
        buffers[micro_batch] = buffer
        peer = self.stage_index_to_group_rank[sender]
        return [dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=peer)]

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor]:
        return (self._activations.pop(fwd_chunk_id).requires_grad_(),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor]:
        return (self._gradients.pop(bwd_chunk_id),)

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """torch 2.11 would refuse inputs that differ in shape from the example."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """torch 2.11 would refuse outputs that differ in shape from the example."""


class PipelineOrder(NamedTuple):
    """This rank's stages, and the schedule by which a fixed number of micro-batches runs through them."""

    stages: Sequence[PlannedStage]
    schedule: Schedule1F1B | ScheduleInterleaved1F1B


def variable_length_stage(
    module: nn.Module,
    stage: int,
    stages: int,
    *,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    measuring: Measuring = lambda phase, micro_batch: nullcontext(),
) -> PlannedStage:
    """Make ``module`` a pipeline stage that runs micro-batches of any length.

    Args:
        module: The first stage takes token ids (rows,), every other one the stream of the stage before it, (rows,
            ``width``); all but the last return such a stream, and the last one what the loss takes. Keywords of a
            micro-batch reach every stage; where one is ``attend``, each stage gets its own (``of_one_stage``).
        stage: Its number, of ``stages``; stage s runs on rank s modulo the ranks of ``group``.
        width: Columns of the stream.
        device: Where it runs.
        dtype: The type of the stream.
        group: The pipeline ranks, in order; None is the default group.
        measuring: A context around each forward and backward, called with "forward" or "backward" and the micro-batch.
    """
    example = torch.empty(1, width, dtype=dtype, device=device, requires_grad=True)
    return PlannedStage(module, stage, stages, example, group, measuring)


def pipeline_order(
    stages: Sequence[PlannedStage], micro_batches: int, loss_fn: Callable[[Tensor, Any], Tensor]
) -> PipelineOrder:
    """1F1B over one stage per rank, interleaved 1F1B over several; gradients of micro-batches are summed.

    ``loss_fn`` takes what the last stage returns and the micro-batch's target. Make it once: stages keep gradients and
    messages from step to step. 1F1B needs as many micro-batches as ranks, interleaved 1F1B a multiple of them.
    """
    if len(stages) == 1:
        return PipelineOrder(stages, Schedule1F1B(stages[0], micro_batches, loss_fn=loss_fn, scale_grads=False))
    interleaved = ScheduleInterleaved1F1B(list(stages), micro_batches, loss_fn=loss_fn, scale_grads=False)
    return PipelineOrder(stages, interleaved)


def run_order(
    order: PipelineOrder,
    inputs: Sequence[Tensor],
    rows: Sequence[int],
    keywords: Sequence[dict[str, Any]],
    targets: Sequence[Any],
) -> list[Tensor]:
    """Run forward and backward of every micro-batch of a step; weights sharded by FSDP2 are gathered once, before.

    Args:
        order: From ``pipeline_order``, for as many micro-batches.
        inputs: Token ids of each micro-batch; they reach the first stage only.
        rows: Rows of the stream that this rank holds of each micro-batch.
        keywords: For every stage.
        targets: For the loss of the last stage.

    Returns:
        The losses, one per micro-batch, on the rank of the last stage; none elsewhere.
    """
    for stage in order.stages:
        stage.begin_step(rows)
        gather_weights(stage.submod)
    losses: list[Tensor] = []
    arguments, schedule = [(tokens,) for tokens in inputs], order.schedule
    schedule._step_microbatches(arguments, list(keywords), list(targets), losses, return_outputs=False)
    return losses
