"""Runs micro-batches of different lengths through pipeline stages, in any order of operations, on PyTorch's runtime.

The stock ``PipelineStage`` learns one shape and allocates all its receive buffers for it. But every rank knows the plan
of the step, and so the tokens of each micro-batch. ``PlannedStage`` makes each buffer in the size of its micro-batch
when the runtime asks for the receive, and releases it when the runtime takes the data.

A stage sends results as soon as they are computed. NCCL deadlocks unless two ranks order their messages alike
(pytorch#172668), so every rank places sends and receives by the same order of the operations of all ranks.

A dealt output head (``wlb.schedules.operations.HEAD``) is one more stage of the runtime on every rank, after those of
blocks. The last of these sends each micro-batch to the head that the operations name.

This is the only file that uses private parts of ``torch.distributed.pipelining``. It relies on the following in torch
2.11 to 2.15: a stage with example inputs and outputs infers no shapes at run time; the runtime runs
``pipeline_order_with_comms`` of its rank, gets received data through the two ``_retrieve_recv_*`` methods, runs
micro-batches through the three ``*_one_chunk`` methods and reductions through ``perform_reduce_grad``, takes lists of
micro-batches in ``_step_microbatches``, and computes no losses without a loss function.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import pairwise, product
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
from wlb.runtime.own_lists import Measuring, complete_gradients, end_backward, gather_weights, reduce_gradients
from wlb.runtime.weight_gradients import WeightGradients
from wlb.schedules.operations import FORWARD, HEAD, INPUT, WEIGHT, Operation, RankOperations, head_ranks
from wlb.schedules.timing import in_dependency_order

LossFunction = Callable[[Tensor, Any], Tensor]


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
        measuring: A context around each forward, loss and backward, called with "forward", "loss" or "backward", or for
            all of a dealt head with "head", and the micro-batch.
    """

    loss_fn: LossFunction  # of the pipeline
    head: "_DealtHead | None" = None  # of this rank

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
        self.stages, self._measuring = stages, measuring
        self._stream = example.detach()
        # Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch 2.13 would compare every tensor with the example.
        self._runtime_validate = False

    def begin_step(
        self,
        token_counts: Sequence[int],
        targets: Sequence[Any],
        operations: Sequence[Operation],
        heads: dict[int, int],
    ) -> None:
        """Set the tokens and the target of each micro-batch of the next step, and how they run.

        ``operations`` are those of the rank. Weight parts of this stage in a row are one product. ``heads`` is for the
        last stage: the rank of the dealt head of each.
        """
        self._token_counts, self._targets, self._heads = token_counts, targets, heads
        self._in_two = {i for s, i, kind in operations if (s, kind) == (self.stage_index, INPUT)}
        in_a_row = (one for one, after in pairwise(operations) if one[::2] == after[::2])
        self._goes_on = {i for s, i, kind in in_a_row if (s, kind) == (self.stage_index, WEIGHT)}
        self._weight_gradients.joined.clear()  # of a step that failed
        self._kept_slices, self.losses, self._for_heads = KeptSlices(), dict[int, Tensor](), dict[int, Tensor]()
        self._activations, self._gradients = dict[int, Tensor](), dict[int, Tensor]()
        if (self._in_two or self.head) and any(map(_reduces_in_backward, self.submod.modules())):
            raise UserError(
                "DDP and FSDP1 reduce gradients inside a backward, before its second part and that of a dealt head; "
                "use fully_shard"
            )
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
            out = super().forward_one_chunk(fwd_chunk_id, args, kwargs, *rest, **more)
        if fwd_chunk_id in self._heads:
            self._for_heads[fwd_chunk_id] = out.detach()
        if self.is_last:
            with self._measuring("loss", fwd_chunk_id):
                self.losses[fwd_chunk_id] = self.loss_fn(out, self._targets[fwd_chunk_id])
        return out

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        loss = self.losses.get(bwd_chunk_id)
        self._weight_gradients.begin(bwd_chunk_id in self._in_two)
        if loss is not None:  # the scores would stay to the end of the backward
            self._forget_outputs(bwd_chunk_id)
        with self._measuring("backward", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        if loss is not None:
            loss.detach_()  # it is kept to the end of the step, and its graph would keep received tensors

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._measuring("backward", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            if bwd_chunk_id not in self._goes_on:
                self._weight_gradients.compute()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        reduce_gradients(self.submod)

    def start_gradient_reduction(self) -> None:
        """Under FSDP2 torch 2.15 calls this instead."""
        self.perform_reduce_grad(1)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        return self._receive(self._activations, fwd_chunk_id, (self.stage_index - 1) % self.group_size)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        following = (self.stage_index + 1) % self.group_size
        return self._receive(self._gradients, bwd_chunk_id, self._heads.get(bwd_chunk_id, following))

    def _receive(self, buffers: dict[int, Tensor], micro_batch: int, sender: int) -> list[dist.P2POp]:
        if micro_batch in buffers:  # this rank sent it
            return []
        buffers[micro_batch] = buffer = self._stream.new_empty(self._token_counts[micro_batch], self._stream.shape[1])
        return [dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=sender)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.head is None or not self._heads:
            return super().get_fwd_send_ops(fwd_chunk_id)
        stream, rank = self._for_heads.pop(fwd_chunk_id), self._heads[fwd_chunk_id]
        return self._send(stream, fwd_chunk_id, rank, self.head._activations)

    def _forget_outputs(self, micro_batch: int) -> None:
        kept: Any = vars(self)
        if "fwd_cache" in kept:  # before torch 2.15
            kept["fwd_cache"][micro_batch] = (), kept["fwd_cache"][micro_batch][1]
        else:
            state = kept["_forward_chunk_states"][micro_batch]
            state.live_outputs, state.output_grad_edges = [], ()

    def _send(self, x: Tensor, micro_batch: int, receiver: int, own_buffers: dict[int, Tensor]) -> list[dist.P2POp]:
        if receiver == self.group_rank:
            own_buffers[micro_batch] = x
            return []
        return [dist.P2POp(dist.isend, x, group=self.group, group_peer=receiver)]

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor]:
        return (self._activations.pop(fwd_chunk_id).requires_grad_(),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor]:
        return (self._gradients.pop(bwd_chunk_id),)

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """torch 2.11 would refuse inputs that differ in shape from the example."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """torch 2.11 would refuse outputs that differ in shape from the example."""


class _DealtHead(PlannedStage):
    """The output head of a rank as one more stage. Its forward runs head, loss and their backward, and nothing is kept.

    Its weights are in the module of ``first``, the first stage of the rank; ``last`` is the last.
    """

    def __init__(self, first: PlannedStage, last: PlannedStage) -> None:
        stages, ranks, stream = first.stages, first.group_size, first._stream
        like: dict[str, Any] = {"width": stream.shape[1], "dtype": stream.dtype, "device": first.device}
        super().__init__(first.submod, stages + first.group_rank, stages + ranks, group=first.group, **like)
        self._weight_gradients, self._measuring, self._last = first._weight_gradients, first._measuring, last

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **more: Any) -> None:
        (stream,) = self._retrieve_recv_activations(fwd_chunk_id)
        self._weight_gradients.begin(False)
        with self._measuring("head", fwd_chunk_id):
            loss = self.loss_fn(stream, self._targets[fwd_chunk_id])
            loss.backward()
            if isinstance(self.submod, FSDPModule):
                end_backward(self.submod)
        self.losses[fwd_chunk_id] = loss.detach()
        self.bwd_cache[fwd_chunk_id] = (stream.grad,)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if isinstance(self.submod, FSDPModule):
            complete_gradients(self.submod)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._receive(self._activations, fwd_chunk_id, self.group_size - 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        (gradient,) = self.bwd_cache.pop(bwd_chunk_id)
        assert gradient is not None, "the loss does not depend on the stream"
        return self._send(gradient, bwd_chunk_id, self.group_size - 1, self._last._gradients)


def _reduces_in_backward(module: nn.Module) -> bool:
    by_replicate = hasattr(module, "set_requires_gradient_sync") and not isinstance(module, FSDPModule)
    return by_replicate or isinstance(module, DistributedDataParallel | FullyShardedDataParallel)


class Pipeline(NamedTuple):
    """The stages of this rank, a dealt head last, and the runtime that runs a number of micro-batches through them."""

    stages: Sequence[PlannedStage]
    runtime: _PipelineScheduleRuntime


def pipeline(
    stages: Sequence[PlannedStage], micro_batches: int, loss_fn: LossFunction, *, deals_head: bool = False
) -> Pipeline:
    """The stages of a rank, to run ``micro_batches`` per step; gradients of micro-batches are summed.

    ``loss_fn`` takes the result of the last stage and the target of the micro-batch. Make a pipeline once: a new one
    would clear accumulated gradients (NeMo Automodel #3530).

    With ``deals_head`` the ``head_ranks`` have copies of the output head, and ``loss_fn`` runs this rank's on the
    stream that the last stage returns. The copy belongs to the module of the rank's first stage, under FSDP2 to its
    outermost unit. Sum the gradients of all copies after each step.
    """
    stages = [*stages]
    if deals_head:
        head = _DealtHead(stages[0], stages[-1])
        for stage in stages:
            stage.head, stage.num_stages = head, head.num_stages
        stages.append(head)
    for stage in stages:
        stage.loss_fn = loss_fn
    runtime = _PipelineScheduleRuntime(stages, micro_batches, scale_grads=False)
    runtime._has_backward = True  # the stages compute the loss
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
            second part of a backward computes weight gradients of linear layers; those in a row, in one stage, together
            (``PRODUCT_ROWS``). A dealt head runs each micro-batch in the first stage of one of the ``head_ranks``.
        inputs: Token ids of each micro-batch; only the first stage gets them.
        rows: Rows of the stream on this rank, for each micro-batch.
        keywords: For every stage.
        targets: For the loss.

    Returns:
        The losses, one per micro-batch, on the rank of the last stage; an empty list elsewhere. With a dealt head, on
        every rank that ran any, zero for those of others.

    Raises:
        UserError: ``operations`` do not take every micro-batch forward and backward through every stage once and
            through a dealt head, or a backward has two parts, or the head is dealt, under DDP or FSDP1.
    """
    rank, ranks, stages = pipe.runtime.rank, pipe.runtime.pp_group_size, pipe.stages[0].stages
    order = _actions(operations, rank, ranks, stages, len(inputs), pipe.stages[0].head is not None)
    pipe.runtime.pipeline_order_with_comms = {rank: order}
    heads = _ranks_of_heads(operations)
    for stage in pipe.stages:
        stage.begin_step(rows, targets, operations[rank], heads if stage.stage_index == stages - 1 else {})
        if stage.stage_index < stages:  # that of a head is among them
            gather_weights(stage.submod)
    pipe.runtime.unsharded_stages |= {stage.stage_index for stage in pipe.stages}  # FSDP2 waits for weights by itself
    pipe.runtime._step_microbatches([(tokens,) for tokens in inputs], list(keywords), return_outputs=False)
    losses = pipe.stages[-1].losses
    if not losses:
        return []
    zero = torch.zeros_like(next(iter(losses.values())))
    return [losses.get(index, zero) for index in range(len(inputs))]


@lru_cache(maxsize=8)
def _actions(
    operations: RankOperations, rank: int, ranks: int, stages: int, micro_batches: int, deals_head: bool
) -> list[_Action]:
    """The actions of the runtime on ``rank``: its operations, the messages between them, and last FSDP2's reductions.

    Pipelines that share weights may run different operations. An earlier reduction could wait for a rank that waits,
    through other reductions and messages, for a later operation of this rank.
    """
    _check(operations, ranks, stages, micro_batches, deals_head)
    kinds, heads, every = _ComputationType, _ranks_of_heads(operations), stages + ranks * deals_head
    actions: list[_Action] = []
    for stage, micro_batch, kind in in_dependency_order(operations):
        forward = kind == FORWARD
        to = stage if kind == WEIGHT else stage + 1 if forward else stage - 1
        if kind == HEAD:
            stage, to = stages + stage, stages - 1
        elif to == stages:
            to += heads.get(micro_batch, 0)
        # To a head and back also on one rank, because the runtime expects it.
        travels = 0 <= to < every and (to % ranks != stage % ranks or max(stage, to) >= stages)
        if stage % ranks == rank:
            actions.append(_Action(stage, kinds.FORWARD if kind == HEAD else kinds(kind), micro_batch))
            if travels:
                actions.append(_Action(stage, kinds.SEND_F if forward else kinds.SEND_B, micro_batch))
        if travels and to % ranks == rank:
            actions.append(_Action(to, kinds.RECV_F if forward else kinds.RECV_B, micro_batch))
    waits = {kinds.SEND_F: "WAIT_SEND_F", kinds.SEND_B: "WAIT_SEND_B"} if hasattr(kinds, "WAIT_SEND_F") else {}
    sent = [action for action in actions if action.computation_type in waits]  # torch before 2.15 waits by itself
    actions += [_Action(s, kinds(waits[kind]), i) for s, kind, i in (action[:3] for action in sent)]
    return actions + [_Action(stage, kinds.REDUCE_GRAD, None) for stage in reversed(range(rank, every, ranks))]


def _ranks_of_heads(operations: RankOperations) -> dict[int, int]:
    """The rank that runs the dealt head of each micro-batch."""
    return {i: rank for rank, of_rank in enumerate(operations) for _, i, kind in of_rank if kind == HEAD}


def _check(operations: RankOperations, ranks: int, stages: int, micro_batches: int, deals_head: bool) -> None:
    """Check the operations of all ranks, so that all of them raise."""
    passes = dict.fromkeys(product(range(stages + deals_head), range(micro_batches)), "")  # a dealt head comes last
    for rank, of_rank in enumerate(operations):
        for stage, micro_batch, kind in of_rank:
            at_home = rank == stage % ranks and (kind != HEAD or (rank == stage and rank in head_ranks(ranks)))
            here = kind if at_home else "elsewhere"
            place = stages if kind == HEAD else stage, micro_batch
            passes[place] = passes.get(place, "surplus") + here
    wrong = [place for place, kinds in passes.items() if kinds not in (("FB", "FIW") if place[0] < stages else ("H",))]
    if wrong or len(operations) != ranks:
        among = [*head_ranks(ranks)]
        head = f", and one of the ranks {among} a head (H) of each in its first stage" if deals_head else ""
        raise UserError(
            f"operations of (stage, micro-batch) {wrong} are wrong; give each of {ranks} ranks a forward (F) and a "
            f"backward (B, or I and W) of {micro_batches} micro-batches in each of its stages (every {ranks}th of "
            f"{stages}){head}"
        )
