"""How many processes a job has along each dimension, and how its pipeline runs."""

from __future__ import annotations

from dataclasses import dataclass

from wlb.errors import UserError
from wlb.schedules.operations import RankOperations, rank_operations

DIMENSIONS = ("tp", "cp", "pp", "dp", "virtual_pp")


@dataclass(frozen=True)
class Layout:
    """tp x cp x pp x dp processes, with ``virtual_pp`` model chunks on each pipeline rank.

    Raises ``UserError`` for a size below 1.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    virtual_pp: int = 1
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if size < 1:
                raise UserError(f"{name} = {size} is not a group size; it must be at least 1")

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in DIMENSIONS}

    @property
    def rank_stages(self) -> list[list[int]]:
        """The stages of every pipeline rank: every pp-th."""
        return [[*range(rank, self.stages, self.pp)] for rank in range(self.pp)]

    def operations(self, micro_batches: int) -> RankOperations:
        """What every pipeline rank runs in a step of so many micro-batches."""
        return rank_operations(self.schedule, self.pp, micro_batches, self.virtual_pp)

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """dp x cp: the ranks that have the same weights to compute with."""
        return self.dp * self.cp

    @property
    def stages(self) -> int:
        return self.pp * self.virtual_pp
