"""The K/V exchange: keys and values are sent to the ranks that attend them, and their gradients returned.

An all-to-all carries keys and values together and exactly the tokens that the plan needs: a rank gets the keys before
its last piece of a segment, not the whole segment as an all-gather would bring it, and ranks may hold different numbers
of tokens. NCCL makes it of messages between the ranks that share a segment, and no rank waits for others; gloo sends
empty messages too. Gradients go the opposite way and are added where they arrive, rank after
rank, so that the sum has the same rounding every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.attention.profiler_regions import region
from wlb.attention.shard_layout import Message

_REGION = "key/value exchange"  # its two ends, in a profiler's trace


@dataclass
class Arrival:
    """An all-to-all in flight; what is sent must not be freed before it is done."""

    work: dist.Work
    received: Tensor
    sent: Tensor

    def wait(self) -> Tensor:
        with region(_REGION):
            self.work.wait()
        return self.received


def send_keys(key: Tensor, value: Tensor, part: Message, group: dist.ProcessGroup | None) -> Arrival:
    """Start sending a part of local keys and values; what arrives is (received tokens, 2, kv_heads, head_dim)."""
    sent = torch.stack([tensor.index_select(0, part.send_rows) for tensor in (key, value)], dim=1)
    return _all_to_all(sent, part.send_counts, part.receive_counts, group)


def return_gradients(grad_received: Tensor, part: Message, group: dist.ProcessGroup | None) -> Arrival:
    """Start sending the gradients of a part's received keys and values back to their owners."""
    return _all_to_all(grad_received, part.receive_counts, part.send_counts, group)


def add_returned(grad: Tensor, returned: Sequence[Tensor], parts: Sequence[Message]) -> Tensor:
    """Local gradients (tokens, kv_heads, head_dim) plus those ``returned`` for each part, in ``grad``'s type."""
    total = grad.to(torch.promote_types(grad.dtype, torch.float32))
    for part, shares in zip(parts, returned, strict=True):
        by_rank = zip(part.send_rows.split(part.send_counts), shares.split(part.send_counts), strict=True)
        for rows, share in by_rank:
            add_rows(total, rows, share)
    return total.to(grad.dtype)


def add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add ``values`` to the ``rows`` of ``total``, each named at most once; much faster on CPU than ``index_add_``."""
    total.index_copy_(0, rows, total.index_select(0, rows).add_(values))


def _all_to_all(
    sent: Tensor, send_counts: list[int], receive_counts: list[int], group: dist.ProcessGroup | None
) -> Arrival:
    received = sent.new_empty(sum(receive_counts), *sent.shape[1:])
    with region(_REGION):
        work = dist.all_to_all_single(received, sent, receive_counts, send_counts, group=group, async_op=True)
    assert work is not None
    return Arrival(work, received, sent)
