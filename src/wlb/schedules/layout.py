"""How many processes a job has along each dimension, how its pipeline runs, and which blocks a stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from wlb.errors import UserError
from wlb.schedules.operations import RankOperations, rank_operations
from wlb.workload.shapes import ModelShape
from wlb.workload.weights import mean_block_weights

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


def split_layers(shape: ModelShape, stages: int) -> list[range]:
    """Deal the blocks to ``stages`` in order, as evenly as the output head allows.

    A stage counts its blocks, of whatever kind; the last one also counts the head, as the share of a block that its
    weights are (so with a large vocabulary the last stage holds fewer blocks). Of experts, those count that a token
    meets. Attention is left out, which makes the head look as heavy as it can be; the embedding is a lookup and counts
    nothing. Blocks that do not divide evenly go to the later stages, whose micro-batches in flight, and with them
    activations, are fewer.

    Raises ``UserError`` if there are fewer blocks than stages.
    """
    if shape.layers < stages:
        raise UserError(
            f"model has {shape.layers} layers, fewer than the {stages} pipeline stages; lower pp or virtual_pp"
        )
    if stages == 1:
        return [range(shape.layers)]
    head = shape.vocab_size * shape.hidden / mean_block_weights(shape, active=True)
    last = round((shape.layers + head) / stages - head)
    last = min(max(last, 1), shape.layers - (stages - 1))
    starts = [(shape.layers - last) * stage // (stages - 1) for stage in range(stages)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], shape.layers], strict=True)]
