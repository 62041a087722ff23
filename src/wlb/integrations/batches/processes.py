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
        if dp is None and _distributed() is None:
            dp = 1
        elif dp is None:
            dp = data_parallel_ranks(self._world(), cp)
        self.dp, self.ranks = dp, dp * cp
        if rank is not None and not 0 <= rank < self.ranks:
            raise UserError(f"rank must be in [0, {self.ranks}), as dp x cp = {self.ranks}; got {rank}")

    def own_rank(self) -> int:
        """The rank given, or that in the group. Raises ``UserError`` where that cannot be known."""
        if self.rank is not None:
            return self.rank
        world = self._world()
        if self.ranks not in (1, world):
            raise UserError(
                f"dp x cp = {self.ranks} are not the {world} processes there are, so rank has no default; leave dp "
                "out, give the group that trains, or give rank, the same where processes train the same micro-batches"
            )
        return _distributed().get_rank(self.group) if self.ranks > 1 else 0

    def agree(self, plan: Mapping[str, Any], rank: int | None) -> None:
        """Compare ``plan`` on all processes, and that each rank is that of equally many; a collective call.

        Nothing is compared where dp x cp = 1 was given: such a process trains by itself. Raises ``UserError`` on every
        process, naming what differs.
        """
        world = self._world()
        if not self._dp_given and self.ranks < world:
            raise UserError(
                f"dp was left out before there was a process group, which has {world} processes now; call "
                "init_process_group first, or give dp"
            )
        if self.ranks == 1 or world == 1:
            return
        gathered: list[Any] = [None] * world
        _distributed().all_gather_object(gathered, (rank, dict(plan)), self.group)
        _check_same([plan for _, plan in gathered])
        _check_dealt([rank for rank, _ in gathered], self.ranks)

    def _world(self) -> int:
        distributed = _distributed()
        world: int = distributed.get_world_size(self.group) if distributed else 1
        if world < 1:
            raise UserError("this process is not in group; give a group that holds it")
        return world


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
            f"{steps} batches, and planned steps differ in how many they have; leave it out, and step the optimizer "
            "once for each step of steps_of(loader, sampler) or packed_batches(...)"
        )


def _check_same(plans: list[dict[str, Any]]) -> None:
    differences = []
    for name in {name: None for plan in plans for name in plan}:
        ours, *others = (plan.get(name) for plan in plans)
        process = next((number for number, theirs in enumerate(others, 1) if theirs != ours), None)
        if process is not None:
            differences.append(f"{name} ({ours!r} on process 0, {others[process - 1]!r} on process {process})")
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(
            f"the processes would train different plans: {', '.join(differences[:3])}{more} differ; give all the same"
        )


def _check_dealt(ranks: list[int | None], count: int) -> None:
    holders = Counter(ranks)
    if None in holders:  # all are dealt by Accelerate
        dealt = len(holders) == 1 and len(ranks) % count == 0
        if "accelerate" not in sys.modules:
            raise UserError(
                "without a rank every process yields the micro-batches of all, which only Accelerate deals; give rank"
            )
    else:
        dealt = set(holders) == {*range(count)} and len({*holders.values()}) == 1
    if not dealt:
        given = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
        raise UserError(
            f"the {len(ranks)} processes have rank = {given}, and dp x cp = {count}: each of its ranks must be that of "
            "equally many processes; leave dp and rank out, or give the group that trains"
        )


def digest(state: Mapping[str, Any] | None) -> str | None:
    """Of ``state``, to compare it by; None for none."""
    return None if state is None else hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]
