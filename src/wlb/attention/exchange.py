"""The K/V exchange: keys and values are sent to the ranks that attend them, and their gradients returned.

It carries keys and values together and exactly the tokens that the plan needs: a rank gets the keys before its last
piece of a segment, not the whole segment as an all-gather would bring it, and ranks may hold different numbers of
tokens. Gradients go the opposite way and are added where they arrive, rank after rank, so that the sum has the same
rounding every time.

Where a plan is for a whole process group this is an all-to-all, which takes gloo half the CPU time of small messages.
Where it is for some ranks of a group, these send each other messages in one batch.

NCCL hangs where one side of a batch has a message that the other side lacks (nccl#2130), and in a group whose first
batch not all ranks join (pytorch#74701). Here both sides take their counts from one matrix of the plan, leave out empty
messages, and return gradients the same way; ``build_mesh`` makes the first call. Two ranks find each other's messages
by their order: they run the plans that they share in the same order, each layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from wlb.attention.shard_layout import ExchangePart, RowSums, ShardLayout

_REGION = "key/value exchange"  # its two ends, in a profiler's trace


class PlanRanks(NamedTuple):
    """The ranks of a shard plan, in its order: all of ``group``, by default the default one, or its ``members``."""

    group: dist.ProcessGroup | None
    members: Sequence[int] | None = None


@dataclass
class Arrival:
    """An exchange in flight; what is sent must not be freed before it is done."""

    work: Sequence[dist.Work]
    received: Tensor
    sent: Tensor

    def wait(self) -> Tensor:
        with record_function(_REGION):
            for work in self.work:
                work.wait()
        self.work = ()  # gloo would wait for a second message
        return self.received


def send_keys(k_TGE: Tensor, v_TGE: Tensor, part: ExchangePart, ranks: PlanRanks) -> Arrival:
    """Start sending a part of the local keys and values; what arrives is (A, 2, G, E)."""
    sent_S2GE = torch.stack([x_TGE.index_select(0, part.send_rows) for x_TGE in (k_TGE, v_TGE)], dim=1)
    return _exchange(sent_S2GE, part.send_counts, part.receive_counts, ranks)


def return_gradients(grad_A2GE: Tensor, part: ExchangePart, ranks: PlanRanks) -> Arrival:
    """Start sending the gradients of a part's received keys and values back to their owners."""
    return _exchange(grad_A2GE, part.receive_counts, part.send_counts, ranks)


def add_returned(grads: Sequence[Tensor], returned: Sequence[Tensor], parts: Sequence[ExchangePart]) -> list[Tensor]:
    """Local gradients of keys and values plus those ``returned`` for each part, (S, 2, G, E), in a wide type."""
    totals = [grad_TGE.to(torch.promote_types(grad_TGE.dtype, torch.float32)) for grad_TGE in grads]
    for part, share_S2GE in zip(parts, returned, strict=True):
        sums = part.send_sums
        rows = part.send_rows if sums is None else sums.rows
        for total_TGE, share_SGE in zip(totals, share_S2GE.unbind(1), strict=True):
            total_TGE[rows] += share_SGE if sums is None else sum_rows(share_SGE.to(total_TGE.dtype), sums)
    return totals


def sum_rows(values: Tensor, sums: RowSums) -> Tensor:
    """The sum of each row's ``values``, 0 without any, in one kernel that adds in float32 or better, in fixed order."""
    if sums.starts is None:
        return values.index_select(0, sums.order)
    summed: Tensor = F.embedding_bag(sums.order, values.flatten(1), sums.starts, mode="sum")
    return summed.view(-1, *values.shape[1:])


def _exchange(sent: Tensor, send_counts: list[int], receive_counts: list[int], ranks: PlanRanks) -> Arrival:
    received = sent.new_empty(sum(receive_counts), *sent.shape[1:])
    group, members = ranks
    with record_function(_REGION):
        if members is None:
            work = dist.all_to_all_single(received, sent, receive_counts, send_counts, group=group, async_op=True)
            assert work is not None
            return Arrival([work], received, sent)
        messages = [
            dist.P2POp(operation, rows, group=group, group_peer=member)
            for operation, tensor, counts in ((dist.isend, sent, send_counts), (dist.irecv, received, receive_counts))
            for rows, member in zip(tensor.split(counts), members, strict=True)
            if len(rows)
        ]
        return Arrival(dist.batch_isend_irecv(messages) if messages else [], received, sent)


class Resends:
    """What the layers of a stage send again in the backward of a micro-batch, each while the one above is computed."""

    def __init__(self) -> None:
        self.last: Resend | None = None

    def add(self, resend: Resend) -> Resend:
        """Take in that of the layer above the last one."""
        resend.below, self.last = self.last, resend
        return resend

    def go_on_below(self, resend: Resend) -> None:
        """Start that of the layer below, and let go of ``resend``."""
        if resend.below is not None:
            resend.below.start()
        self.last, resend.below = resend.below, None


class Resend:
    """Keys and values of one layer, to be sent again; ``below`` is that of the layer before it."""

    def __init__(self, k_TGE: Tensor, v_TGE: Tensor, layout: ShardLayout, ranks: PlanRanks) -> None:
        self._unsent: tuple[Tensor, Tensor] | None = (k_TGE.detach(), v_TGE.detach())
        self._layout, self._ranks = layout, ranks
        self._arrivals: list[Arrival] = []
        self.below: Resend | None = None

    def start(self) -> None:
        """Start sending, if that has not happened yet."""
        if self._unsent is not None:
            self._arrivals = [send_keys(*self._unsent, part, self._ranks) for part in self._layout.parts]
            self._unsent = None

    def take(self) -> list[Arrival]:
        """What was sent; held here no longer, as graphs live to the end of a step."""
        self.start()
        arrivals, self._arrivals = self._arrivals, []
        return arrivals
