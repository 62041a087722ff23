"""The K/V exchange: keys and values are sent to the ranks that attend them, and their gradients returned.

A message between two ranks carries keys and values together and exactly the tokens that the plan needs: a rank gets the
keys before its last piece of a segment, not the whole segment as an all-gather would bring it, and ranks may hold
different numbers of tokens. Ranks that share no segment send each other nothing, so a plan may be for some ranks of a
group, while the others do something else. Gradients go the opposite way and are added where they arrive, rank after
rank, so that the sum has the same rounding every time.

Two ranks find each other's messages by their order alone. It is the same on both, as both run the same plans in the
same order, each layer by layer, forward, backward and where it is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.attention.profiler_regions import region
from wlb.attention.shard_layout import ExchangePart, ShardLayout

_REGION = "key/value exchange"  # its two ends, in a profiler's trace


_connected: WeakSet[dist.ProcessGroup] = WeakSet()


class PlanRanks(NamedTuple):
    """The ranks of a shard plan, in its order: those of ``group`` that are numbered ``members`` in it."""

    group: dist.ProcessGroup
    members: Sequence[int]


def connect(group: dist.ProcessGroup, device: torch.device | str) -> None:
    """Have all ranks of ``group`` set up its communicator for tensors of ``device``, unless they have.

    NCCL does so in a group's first call, which then waits for all ranks; an exchange may be the call of some only.
    """
    if group not in _connected:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)


@dataclass
class Arrival:
    """Messages in flight; what is sent must not be freed before they are done."""

    work: Sequence[dist.Work]
    received: Tensor
    sent: Tensor

    def wait(self) -> Tensor:
        with region(_REGION):
            for work in self.work:
                work.wait()
        return self.received


def send_keys(k_TGE: Tensor, v_TGE: Tensor, part: ExchangePart, ranks: PlanRanks) -> Arrival:
    """Start sending a part of the local keys and values; what arrives is (A, 2, G, E)."""
    sent_S2GE = torch.stack([x_TGE.index_select(0, part.send_rows) for x_TGE in (k_TGE, v_TGE)], dim=1)
    return _exchange(sent_S2GE, part.send_counts, part.receive_counts, ranks)


def return_gradients(grad_A2GE: Tensor, part: ExchangePart, ranks: PlanRanks) -> Arrival:
    """Start sending the gradients of a part's received keys and values back to their owners."""
    return _exchange(grad_A2GE, part.receive_counts, part.send_counts, ranks)


def add_returned(grad_TGE: Tensor, returned: Sequence[Tensor], parts: Sequence[ExchangePart]) -> Tensor:
    """Local gradients plus those ``returned`` for each part, (S, G, E), in the type of the local ones."""
    total_TGE = grad_TGE.to(torch.promote_types(grad_TGE.dtype, torch.float32))
    for part, share_SGE in zip(parts, returned, strict=True):
        by_rank = (tensor.split(part.send_counts) for tensor in (part.send_rows, share_SGE))
        for rows, share in zip(*by_rank, strict=True):
            add_rows(total_TGE, rows, share)
    return total_TGE.to(grad_TGE.dtype)


def add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add ``values`` to the ``rows`` of ``total``, each named at most once; much faster on CPU than ``index_add_``."""
    total.index_copy_(0, rows, total.index_select(0, rows).add_(values))


def _exchange(sent: Tensor, send_counts: list[int], receive_counts: list[int], ranks: PlanRanks) -> Arrival:
    received = sent.new_empty(sum(receive_counts), *sent.shape[1:])
    messages = [
        dist.P2POp(operation, rows, group=ranks.group, group_peer=member)
        for operation, tensor, counts in ((dist.isend, sent, send_counts), (dist.irecv, received, receive_counts))
        for rows, member in zip(tensor.split(counts), ranks.members, strict=True)
        if len(rows)
    ]
    with region(_REGION):
        return Arrival(dist.batch_isend_irecv(messages) if messages else (), received, sent)


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
