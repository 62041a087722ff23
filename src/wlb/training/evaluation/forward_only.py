"""One micro-batch forward through all pipeline stages, without gradients.

PyTorch's schedules exist for training; a forward pass alone is short enough to write down. The rows of the residual
stream follow from the micro-batch, as in training, so nothing but the stream itself is sent. Stages run in their order,
one micro-batch at a time: ranks that follow each other overlap, the chunks of an interleaved schedule on one rank do
not, and sends and receives of two ranks always match in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from wlb.models.transformer import Attend, Transformer


class ForwardOnly:
    """Runs this rank's ``stages``; every rank of ``group``, the pipeline ranks in order, calls it alike."""

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
