"""Which process trains what: as ``torch.distributed`` has it unless given, and alike on all of them.

Every process plans for itself, so one with another seed, other documents or a wrong rank would leave documents out and
train others twice, without an error. Before the first step they therefore compare what they are about to train.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from wlb.errors import UserError
from wlb.runtime.collectives import gathered


class Processes:
    """This process among those that train together: ``rank`` of ``dp`` x ``cp``, neighbours being context-parallel.

    ``dp`` None is all processes of ``group`` (None is the default group) over ``cp``, or 1 where there is no group.
    Several processes may have the same rank, as those of a tensor-parallel group do. Raises ``UserError`` for sizes
    that the group cannot have.
    """

    def __init__(self, rank: int | None, dp: int | None, cp: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.group, self._dp_given = rank, group, dp is not None
        if cp < 1 or (dp is None and _has_group() and self.world % cp):
            raise UserError(f"{self.world} processes cannot be divided into groups of cp = {cp}; give a divisor")
        self.dp = dp if dp is not None else self.world // cp if _has_group() else 1
        if self.dp < 1:
            raise UserError(f"dp must be >= 1; got {dp}")
        self.ranks = self.dp * cp
        if rank is not None and not 0 <= rank < self.ranks:
            raise UserError(f"rank must be in [0, {self.ranks}), as dp x cp = {self.ranks}; got {rank}")

    @property
    def world(self) -> int:
        """Processes of the group; 1 where there is none."""
        if (world := dist.get_world_size(self.group) if _has_group() else 1) < 1:
            raise UserError("this process is not in group; give a group that holds it")
        return world

    def own_rank(self) -> int:
        """The rank given, or that in the group. Raises ``UserError`` where that cannot be known."""
        if self.rank is None and self.ranks not in (1, self.world):
            raise UserError(f"dp x cp = {self.ranks} are not the {self.world} processes; leave dp out, or give a group")
        return self.rank if self.rank is not None else dist.get_rank(self.group) if self.ranks > 1 else 0

    def agree(self, plan: Mapping[str, Any], rank: int | None) -> list[int | None]:
        """Compare ``plan`` on all processes, and that each rank is that of equally many; a collective call.

        Returns the rank of every process; none where dp x cp = 1 was given, as such a process trains by itself. Raises
        ``UserError`` on every process, naming what differs.
        """
        if not self._dp_given and self.ranks < self.world:
            early = f"dp was left out before there was a process group, now of {self.world}"
            raise UserError(f"{early}; call init_process_group first")
        if self.ranks == 1 or self.world == 1:
            return []
        ranks, plans = zip(*gathered((rank, dict(plan)), self.group), strict=True)
        for theirs in plans:
            differing = [name for name in {**plans[0], **theirs} if plans[0].get(name) != theirs.get(name)]
            values = [f"{name} = {plans[0].get(name)!r} and {theirs.get(name)!r}" for name in differing[:3]]
            if values:
                raise UserError(f"the processes would train different plans: {', '.join(values)} differ; give the same")
        held: Counter[Any] = Counter(ranks)
        if {*held} != {*range(self.ranks)} or len({*held.values()}) > 1:
            must = f"dp x cp = {self.ranks}: each must be that of equally many"
            remedy = "give rank, leave dp out, or give the group that trains"
            raise UserError(f"the processes have rank = {', '.join(map(str, ranks))}, and {must}; {remedy}")
        return [*ranks]


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def warn(message: str, group: dist.ProcessGroup | None = None) -> None:
    """Warn on the first process of ``group`` only, once for each line of code that comes here."""
    if not _has_group() or dist.get_rank(group) == 0:
        warnings.warn(f"wlb: {message}", stacklevel=3)


def check_accumulation() -> None:
    """Raise ``UserError`` where Accelerate divides losses and counts batches to the next optimizer step by itself."""
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None and (steps := accelerate.GradientState().num_steps) > 1:
        divides = f"Accelerator(gradient_accumulation_steps={steps}) divides every loss by {steps}"
        raise UserError(f"{divides}, and steps after as many batches; leave it out, and give micro_batches")
