"""The K/V exchange: it sends keys and values to the ranks that attend them, and returns their gradients.

Keys and values travel together, and only the tokens that the plan needs, where an all-gather would send whole
segments. Gradients travel back and are added rank after rank, so that the sum is rounded the same way every time.

For a plan over a whole process group this is an all-to-all, which costs gloo half the CPU time of small messages. For a
plan over some ranks of a group, these ranks send each other messages in one batch.

NCCL hangs where one side of a batch has a message that the other side lacks (nccl#2130), and in a group whose first
batch not all ranks join (pytorch#74701). So both sides take their counts from the same matrix of the plan, leave out
empty messages, and return gradients the same way; ``build_mesh`` makes the first call. Two ranks match their messages
by order: they run the plans that they share in the same order, layer by layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from wlb.attention.shard_layout import ExchangePart, RowSums, ShardLayout

_REGION = "key/value exchange"  # label of its start and of its wait in a profiler's trace


class PlanRanks(NamedTuple):
    """The ranks of a shard plan, in its order: ``members`` of ``group``, or all of it; None is the default group."""

    group: dist.ProcessGroup | None
    members: Sequence[int] | None = None


@dataclass
class PendingExchange:
    """An exchange in flight. It holds ``sent``, which must not be freed before the exchange is done."""

    work: Sequence[dist.Work]
    received: Tensor
    sent: Tensor

    def wait(self) -> Tensor:
        with record_function(_REGION):
            for work in self.work:
                work.wait()
        self.work = ()  # waiting twice would make gloo wait for a second message
        return self.received


def send_keys(k_TGE: Tensor, v_TGE: Tensor, part: ExchangePart, ranks: PlanRanks) -> PendingExchange:
    """Start sending a part of the local keys and values; the received tensor is (A, 2, G, E)."""
    sent_S2GE = torch.stack([x_TGE.index_select(0, part.send_rows) for x_TGE in (k_TGE, v_TGE)], dim=1)
    return _exchange(sent_S2GE, part.send_counts, part.receive_counts, ranks)


def return_gradients(grad_A2GE: Tensor, part: ExchangePart, ranks: PlanRanks) -> PendingExchange:
    """Start sending the gradients of received keys and values back to the ranks that own them."""
    return _exchange(grad_A2GE, part.receive_counts, part.send_counts, ranks)


def add_returned(grads: Sequence[Tensor], returned: Sequence[Tensor], parts: Sequence[ExchangePart]) -> list[Tensor]:
    """Local gradients of keys and values plus ``returned`` of each part, (S, 2, G, E), in float32 or wider."""
    totals = [grad_TGE.to(torch.promote_types(grad_TGE.dtype, torch.float32)) for grad_TGE in grads]
    for part, share_S2GE in zip(parts, returned, strict=True):
        sums = part.send_sums
        rows = part.send_rows if sums is None else sums.rows
        for total_TGE, share_SGE in zip(totals, share_S2GE.unbind(1), strict=True):
            total_TGE[rows] += share_SGE if sums is None else sum_rows(share_SGE.to(total_TGE.dtype), sums)
    return totals


def sum_rows(values: Tensor, sums: RowSums) -> Tensor:
    """Sum the ``values`` of each row (0 without any) in one kernel, in fixed order and in float32 or wider."""
    if sums.starts is None:
        return values.index_select(0, sums.order)
    summed: Tensor = F.embedding_bag(sums.order, values.flatten(1), sums.starts, mode="sum")
    return summed.view(-1, *values.shape[1:])


def _exchange(sent: Tensor, send_counts: list[int], receive_counts: list[int], ranks: PlanRanks) -> PendingExchange:
    received = sent.new_empty(sum(receive_counts), *sent.shape[1:])
    group, members = ranks
    with record_function(_REGION):
        if members is None:
            work = dist.all_to_all_single(received, sent, receive_counts, send_counts, group=group, async_op=True)
            assert work is not None
            return PendingExchange([work], received, sent)
        messages = [
            dist.P2POp(operation, rows, group=group, group_peer=member)
            for operation, tensor, counts in ((dist.isend, sent, send_counts), (dist.irecv, received, receive_counts))
            for rows, member in zip(tensor.split(counts), members, strict=True)
            if len(rows)
        ]
        return PendingExchange(dist.batch_isend_irecv(messages) if messages else [], received, sent)


class KVReexchange:
    """Exchanges the keys and values of one layer again."""

    def __init__(self, k_TGE: Tensor, v_TGE: Tensor, layout: ShardLayout, ranks: PlanRanks) -> None:
        self._unsent: tuple[Tensor, Tensor] | None = (k_TGE.detach(), v_TGE.detach())
        self._layout, self._ranks = layout, ranks
        self._pending: list[PendingExchange] = []

    def start(self) -> None:
        """Start sending, unless it has started already."""
        if self._unsent is not None:
            self._pending = [send_keys(*self._unsent, part, self._ranks) for part in self._layout.parts]
            self._unsent = None

    def take(self) -> list[PendingExchange]:
        """Return the exchanges, and hold them no longer, because graphs live to the end of a step."""
        self.start()
        pending, self._pending = self._pending, []
        return pending


class KVReexchanges:
    """The exchanges that a stage repeats in the backward of a micro-batch, each during the layer above its own."""

    def __init__(self) -> None:
        self._layers: list[KVReexchange] = []  # from the bottom up

    def add(self, reexchange: KVReexchange) -> KVReexchange:
        """Add the exchange of the next layer up."""
        self._layers.append(reexchange)
        return reexchange

    def start_below(self, reexchange: KVReexchange) -> None:
        """Start the exchange of the layer below, and release ``reexchange``."""
        del self._layers[self._layers.index(reexchange) :]
        if self._layers:
            self._layers[-1].start()
