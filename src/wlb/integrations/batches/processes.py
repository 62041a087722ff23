"""Which process trains what: as ``torch.distributed`` has it unless given, and alike on all of them.

Every process plans for itself, so one with another seed, other documents or a wrong rank would leave documents out and
train others twice, without an error. Before the first step they therefore compare what they are about to train.

Torch is only looked at where the program has imported it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

from wlb.errors import UserError


class Processes:
    """This process among those that train together: ``rank`` of ``dp`` x ``cp``, neighbours being context-parallel.

    ``dp`` None is all processes of ``group`` (None is the default group) over ``cp``, or 1 where there is no group.
    Several processes may have the same rank, as those of a tensor-parallel group do. Raises ``UserError`` for sizes
    that the group cannot have.
    """

    def __init__(self, rank: int | None, dp: int | None, cp: int, group: Any = None) -> None:
        self.rank, self.group = rank, group
        self._dp_given = dp is not None
        self.dp = data_parallel_ranks(self.world, cp) if dp is None and _distributed() else dp or 1
        self.ranks = self.dp * cp
        if rank is not None and not 0 <= rank < self.ranks:
            raise UserError(f"rank must be in [0, {self.ranks}), as dp x cp = {self.ranks}; got {rank}")

    @property
    def world(self) -> int:
        """Processes of the group; 1 where there is none."""
        distributed = _distributed()
        world: int = distributed.get_world_size(self.group) if distributed else 1
        if world < 1:
            raise UserError("this process is not in group; give a group that holds it")
        return world

    def own_rank(self) -> int:
        """The rank given, or that in the group. Raises ``UserError`` where that cannot be known."""
        if self.rank is not None:
            return self.rank
        if self.ranks not in (1, self.world):
            raise UserError(
                f"dp x cp = {self.ranks} are not the {self.world} processes there are, so rank has no default; leave "
                "dp out, give the group that trains, or give rank, the same where processes train the same "
                "micro-batches"
            )
        return _distributed().get_rank(self.group) if self.ranks > 1 else 0

    def agree(self, plan: Mapping[str, Any], rank: int | None) -> list[int | None]:
        """Compare ``plan`` on all processes, and that each rank is that of equally many; a collective call.

        Nothing is compared where dp x cp = 1 was given: such a process trains by itself. Returns the rank of every
        process compared. Raises ``UserError`` on every process, naming what differs.
        """
        world = self.world
        if not self._dp_given and self.ranks < world:
            raise UserError(
                f"dp was left out before there was a process group, which has {world} processes now; call "
                "init_process_group first, or give dp"
            )
        if self.ranks == 1 or world == 1:
            return []
        gathered: list[Any] = [None] * world
        _distributed().all_gather_object(gathered, (rank, dict(plan)), self.group)
        ranks, plans = zip(*gathered, strict=True)
        for process, theirs in enumerate(plans):
            if differing := [name for name in {**plans[0], **theirs} if plans[0].get(name) != theirs.get(name)]:
                values = [f"{name} = {plans[0].get(name)!r} and {theirs.get(name)!r}" for name in differing[:3]]
                raise UserError(
                    f"processes 0 and {process} would train different plans: {', '.join(values)}; give all the same"
                )
        held = Counter(ranks)
        dealt = [*held] == [None] and world % self.ranks == 0 and "accelerate" in sys.modules  # which deals them
        if not dealt and ({*held} != {*range(self.ranks)} or len({*held.values()}) > 1):
            raise UserError(
                f"the {world} processes have rank = {', '.join(map(str, ranks))}, and dp x cp = {self.ranks}: each of "
                "its ranks must be that of equally many processes; give rank, leave dp out, or give the group that "
                "trains"
            )
        return [*ranks]


def _distributed() -> Any:
    """``torch.distributed`` where a process group is initialised, or None."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed and distributed.is_available() and distributed.is_initialized() else None


def warn(message: str) -> None:
    """Warn on the first process only, once for each line of code that comes here."""
    if (distributed := _distributed()) is None or distributed.get_rank() == 0:
        warnings.warn(f"wlb: {message}", stacklevel=4)


def data_parallel_ranks(processes: int, cp: int) -> int:
    """Context-parallel groups of ``cp`` that the processes make. Raises ``UserError`` where some would be left."""
    if cp < 1 or processes % cp:
        raise UserError(
            f"{processes} processes cannot be divided into context-parallel groups of cp = {cp}; give a divisor"
        )
    return processes // cp


def check_accumulation() -> None:
    """Raise ``UserError`` where Accelerate divides losses and counts batches to the next optimizer step by itself."""
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None and (steps := accelerate.GradientState().num_steps) > 1:
        raise UserError(
            f"Accelerator(gradient_accumulation_steps={steps}) divides every loss by {steps} and steps after every "
            f"{steps} batches, and planned steps differ in how many they have; leave it out, and give micro_batches"
        )


def digest(state: Mapping[str, Any] | None) -> str | None:
    """Of ``state``, to compare it by; None for none."""
    return None if state is None else hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]
