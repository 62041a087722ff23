"""Runs micro-batches of different lengths through pipeline stages, in any order of operations, on PyTorch's runtime.

The stock ``PipelineStage`` learns one shape and allocates all its receive buffers for it. But every rank knows the plan
of the step, and so the tokens of each micro-batch. ``PlannedStage`` makes each buffer in the size of its micro-batch
when the runtime asks for the receive, and releases it when the runtime takes the data. It is constructed once and never
re-initialised, which would clear accumulated gradients (NeMo Automodel #3530).

A stage sends results as soon as they are computed. NCCL deadlocks unless two ranks order their messages alike
(pytorch#172668), so every rank places sends and receives by the same order of the operations of all ranks.

This is the only file that uses private parts of ``torch.distributed.pipelining``. It relies on the following in torch
2.11 to 2.14: a stage with example inputs and outputs infers no shapes at run time; the runtime runs
``pipeline_order_with_comms`` of its rank, gets received data through the two ``_retrieve_recv_*`` methods, runs
micro-batches through the three ``*_one_chunk`` methods and reductions through ``perform_reduce_grad``, and takes lists
of micro-batches in ``_step_microbatches``.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import chain, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.nn.parallel import DistributedDataParallel

from wlb.attention.slices import KeptSlices
from wlb.errors import UserError
from wlb.runtime.own_lists import Measuring, end_backward, fsdp_units, gather_weights, reduce_gradients
from wlb.runtime.weight_gradients import WeightGradients
from wlb.schedules.operations import FORWARD, INPUT, WEIGHT, RankOperations
from wlb.schedules.timing import in_dependency_order


class PlannedStage(PipelineStage):
    """A pipeline stage that passes on a residual stream (rows, width), whose rows differ by micro-batch.

    Args:
        module: The first stage takes token ids (rows,), every other stage the stream of the stage before it, (rows,
            ``width``). All but the last return such a stream, and the last returns the input of the loss. Keywords of a
            micro-batch reach every stage, and each stage gets its own ``attend`` (``of_one_stage``).
        stage: Its number, of ``stages``; stage s runs on rank s modulo the ranks of ``group``.
        width: Columns of the stream.
        device: The device of the stage.
        dtype: The type of the stream.
        group: The pipeline ranks, in order; None is the default group.
        measuring: A context around each forward and backward, called with "forward" or "backward" and the micro-batch.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        stages: int,
        *,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        measuring: Measuring = lambda phase, micro_batch: nullcontext(),
    ) -> None:
        example = torch.empty(1, width, dtype=dtype, device=device, requires_grad=True)
        inputs = example if stage else torch.empty(1, dtype=torch.int64, device=device)
        self._weight_gradients = WeightGradients(module)
        super().__init__(
            *(module, stage, stages, device),
            input_args=inputs,
            output_args=example,
            group=group,
            dw_builder=self._weight_gradients.end,
        )
        self._measuring = measuring
        self._stream = example.detach()
        self._token_counts: Sequence[int] = ()
        self._kept_slices = KeptSlices()
        self._in_two: frozenset[int] = frozenset()
        self._activations: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        # Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch 2.13 would compare every tensor with the example.
        self._runtime_validate = False

    def begin_step(self, token_counts: Sequence[int], in_two: Iterable[int]) -> None:
        """Set the tokens of each micro-batch of the next step, and the micro-batches whose backward has two parts."""
        self._token_counts, self._in_two = token_counts, frozenset(in_two)
        self._kept_slices = KeptSlices()
        if self._in_two and any(map(_reduces_in_backward, self.submod.modules())):
            raise UserError("DDP and FSDP1 reduce gradients before the second part of a backward; use fully_shard")
        self.has_backward = True
        self.clear_runtime_states()

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *rest: Any, **more: Any
    ) -> Any:
        kwargs = kwargs or {}
        if "attend" in kwargs:
            kwargs = kwargs | {"attend": kwargs["attend"].of_one_stage(self._kept_slices)}
        self._weight_gradients.begin(fwd_chunk_id in self._in_two)
        with self._measuring("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, *rest, **more)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        self._weight_gradients.begin(bwd_chunk_id in self._in_two)
        if loss is not None:  # the scores would stay to the end of the backward
            self.fwd_cache[bwd_chunk_id] = (), self.fwd_cache[bwd_chunk_id][1]
        with self._measuring("backward", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        if loss is not None:
            loss.detach_()  # the schedule keeps it to the end of the step, and its graph would keep received tensors

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._measuring("backward", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            for unit in fsdp_units(self.submod):
                end_backward(unit)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        reduce_gradients(self.submod)

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


def _reduces_in_backward(module: nn.Module) -> bool:
    by_replicate = hasattr(module, "set_requires_gradient_sync") and not isinstance(module, FSDPModule)
    return by_replicate or isinstance(module, DistributedDataParallel | FullyShardedDataParallel)


class Pipeline(NamedTuple):
    """The stages of this rank, and the runtime that runs a fixed number of micro-batches through them."""

    stages: Sequence[PlannedStage]
    runtime: _PipelineScheduleRuntime


def pipeline(stages: Sequence[PlannedStage], micro_batches: int, loss_fn: Callable[[Tensor, Any], Tensor]) -> Pipeline:
    """The stages of a rank, to run ``micro_batches`` per step; gradients of micro-batches are summed.

    ``loss_fn`` takes the result of the last stage and the target of the micro-batch. Make a pipeline once: stages keep
    gradients and messages from step to step.
    """
    runtime = _PipelineScheduleRuntime([*stages], micro_batches, loss_fn, scale_grads=False)
    runtime.unsharded_stages |= {stage.stage_index for stage in stages}  # run_order gathers; FSDP2 waits unit by unit
    return Pipeline(stages, runtime)


def run_order(
    pipe: Pipeline,
    operations: RankOperations,
    inputs: Sequence[Tensor],
    rows: Sequence[int],
    keywords: Sequence[dict[str, Any]],
    targets: Sequence[Any],
) -> list[Tensor]:
    """Run the ``operations`` of a step; FSDP2 gathers weights once, before, and reduces gradients once, at the end.

    Args:
        pipe: From ``pipeline``, for the same number of micro-batches.
        operations: The operations of each pipeline rank, in order (``wlb.schedules.operations.rank_operations`` makes
            the named schedules). They may differ from step to step, and between pipelines that share weights. The
            second part of a backward computes weight gradients of linear layers.
        inputs: Token ids of each micro-batch; only the first stage gets them.
        rows: Rows of the stream on this rank, for each micro-batch.
        keywords: For every stage.
        targets: For the loss of the last stage.

    Returns:
        The losses, one per micro-batch, on the rank of the last stage; an empty list elsewhere.

    Raises:
        UserError: ``operations`` do not take every micro-batch forward and backward through every stage once, or a
            backward has two parts under DDP or FSDP1.
    """
    rank, ranks, stages = pipe.runtime.rank, pipe.runtime.pp_group_size, pipe.stages[0].num_stages
    pipe.runtime.pipeline_order_with_comms = {rank: _actions(operations, rank, ranks, stages, len(inputs))}
    for stage in pipe.stages:
        stage.begin_step(rows, [i for s, i, kind in operations[rank] if s == stage.stage_index and kind == INPUT])
        gather_weights(stage.submod)
    losses: list[Tensor] = []
    arguments = [(tokens,) for tokens in inputs]
    pipe.runtime._step_microbatches(arguments, list(keywords), list(targets), losses, return_outputs=False)
    return losses


@lru_cache(maxsize=8)
def _actions(operations: RankOperations, rank: int, ranks: int, stages: int, micro_batches: int) -> list[_Action]:
    """The actions of the runtime on ``rank``: its operations, the messages between them, and last FSDP2's reductions.

    Pipelines that share weights may run different operations. An earlier reduction could wait for a rank that waits,
    through other reductions and messages, for a later operation of this rank.
    """
    _check(operations, ranks, stages, micro_batches)
    kinds = _ComputationType
    actions: list[_Action] = []
    for stage, micro_batch, kind in in_dependency_order(operations):
        forward = kind == FORWARD
        to = stage if kind == WEIGHT else stage + 1 if forward else stage - 1
        travels = 0 <= to < stages and to % ranks != stage % ranks
        if stage % ranks == rank:
            actions.append(_Action(stage, kinds(kind), micro_batch))
            if travels:
                actions.append(_Action(stage, kinds.SEND_F if forward else kinds.SEND_B, micro_batch))
        elif travels and to % ranks == rank:
            actions.append(_Action(to, kinds.RECV_F if forward else kinds.RECV_B, micro_batch))
    return actions + [_Action(stage, kinds.REDUCE_GRAD, None) for stage in reversed(range(rank, stages, ranks))]


def _check(operations: RankOperations, ranks: int, stages: int, micro_batches: int) -> None:
    """Check the operations of all ranks, so that all of them raise."""
    passes = dict.fromkeys(product(range(stages), range(micro_batches)), "")
    for rank, of_rank in enumerate(operations):
        for stage, micro_batch, kind in of_rank:
            here = kind if stage % ranks == rank else "elsewhere"
            passes[stage, micro_batch] = passes.get((stage, micro_batch), "surplus") + here
    wrong = [place for place, kinds in passes.items() if kinds not in ("FB", "FIW")]
    losses = [i for stage, i, kind in chain(*operations) if stage == stages - 1 and kind == FORWARD]
    if wrong or losses != sorted(losses) or len(operations) != ranks:
        raise UserError(
            f"operations of (stage, micro-batch) {wrong or 'the last stage'} are wrong; give each of {ranks} ranks a "
            f"forward (F) and a backward (B, or I and W) of {micro_batches} micro-batches in each of its stages (every "
            f"{ranks}th of {stages}), and the last stage its forwards in order"
        )
