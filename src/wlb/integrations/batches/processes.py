"""The rank of a process and the sizes of the job, from ``torch.distributed`` unless given.

Every process plans by itself. A process with another seed, other documents or a wrong rank would silently skip some
documents and train others twice. So before the first step the processes compare what they are about to train.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from wlb.errors import UserError
from wlb.runtime.collectives import agreeing_group, gathered
from wlb.runtime.steps import Settings
from wlb.token_count import check_whole


class Processes:
    """The place of this process: ``rank`` of ``dp`` x ``cp``, where neighbours are context-parallel.

    ``dp`` None is all processes of ``group`` (None is the default group) over ``cp``, or 1 without a group. Processes
    of a tensor-parallel group have the same rank. Raises ``UserError`` for sizes that do not fit the group.
    """

    def __init__(self, rank: int | None, dp: int | None, cp: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.group, self._dp_given = rank, group, dp is not None
        for name, value, least in (("dp", dp, 1), ("cp", cp, 1), ("rank", rank, 0)):
            if value is not None:
                check_whole(name, value, least)
        if dp is None and dist.is_initialized() and self.world % cp:
            raise UserError(f"cp = {cp} does not divide the number of processes, {self.world}; give a divisor")
        self.dp = dp if dp is not None else self.world // cp if dist.is_initialized() else 1
        self.ranks = self.dp * cp
        if rank is not None and rank >= self.ranks:
            raise UserError(f"rank = {rank} is not below dp x cp = {self.ranks}; give the rank of this process")

    @property
    def world(self) -> int:
        """Processes of the group; 1 where there is none."""
        if (world := dist.get_world_size(self.group) if dist.is_initialized() else 1) < 1:
            raise UserError("this process is not in group; give a group that contains it")
        return world

    def own_rank(self) -> int:
        """The given rank, or the rank in the group. Raises ``UserError`` if neither is known."""
        if self.rank is None and self.ranks not in (1, self.world):
            sizes = f"dp x cp = {self.ranks} is not the number of processes, {self.world}"
            raise UserError(f"{sizes}; give rank or a group")
        return self.rank if self.rank is not None else dist.get_rank(self.group) if self.ranks > 1 else 0

    def agree(self, settings: Settings, begins: Mapping[str, Any], rank: int | None) -> list[int | None]:
        """Check that both are the same on all processes, and that equally many have each rank; a collective call.

        Returns the rank of every process, or an empty list where dp x cp = 1 was given and the process trains alone.
        Raises ``UserError`` on every process, with the settings that differ, and where Accelerate accumulates.
        """
        _check_accumulation()
        if not self._dp_given and self.ranks < self.world:
            early = f"dp was left out when there was no process group, and now it has {self.world} processes"
            raise UserError(f"{early}; call init_process_group first")
        if self.ranks == 1 or self.world == 1:
            return []
        plan = {name: value for kind in settings.values() for name, value in kind.items()} | dict(begins)
        ranks, plans = zip(*gathered((rank, plan), agreeing_group(self.group)), strict=True)
        for theirs in plans:
            differing = [name for name in {**plans[0], **theirs} if plans[0].get(name) != theirs.get(name)]
            values = [f"{name} = {plans[0].get(name)!r} and {theirs.get(name)!r}" for name in differing[:3]]
            if values:
                raise UserError(f"processes have different settings: {', '.join(values)}; give all the same")
        held: Counter[Any] = Counter(ranks)
        if {*held} != {*range(self.ranks)} or len({*held.values()}) > 1:
            held_ranks = f"processes have rank = {', '.join(map(str, ranks))}, and dp x cp = {self.ranks}"
            raise UserError(f"{held_ranks}; give equally many each rank, leave dp out, or give the group that trains")
        return [*ranks]


def _check_accumulation() -> None:
    """Raise ``UserError`` if Accelerate itself divides losses and counts batches up to an optimizer step."""
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None and (steps := accelerate.GradientState().num_steps) > 1:
        divides = f"Accelerator(gradient_accumulation_steps={steps}) divides every loss by {steps}"
        raise UserError(f"{divides} and steps after {steps} batches; leave it out, and give micro_batches")
