"""The number of processes along each dimension, how the pipeline runs, and which blocks a stage holds."""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from wlb.errors import UserError
from wlb.schedules.critical_path import dealt_head_lists
from wlb.schedules.operations import RankOperations, head_ranks, rank_operations
from wlb.settings import MOST_RANKS
from wlb.workload.shapes import ModelShape
from wlb.workload.weights import mean_block_weights

Weights = Literal["auto", "kept", "gathered"]
Head = Literal["auto", "last", "dealt"]


@dataclass(frozen=True)
class Layout:
    """tp x cp x pp x dp processes, with ``virtual_pp`` model chunks on each pipeline rank.

    A pool is the ranks of a stage that run a micro-batch together: ``pool`` of its dp x cp ranks, by default cp. The
    experts of every block are divided over ``ep`` GPUs of a stage, next to each other.
    ``stage_blocks`` is the number of blocks of each stage; None deals them by weight (``split_layers``). Without a
    pipeline, ``weights`` are kept until the step ends (FSDP2 without resharding, DDP or Megatron with a sharded
    optimizer), or gathered again for every pass (FSDP2's default); "auto" keeps them where memory allows. The
    output ``head`` of a pipeline is on the last stage, or dealt: on the ``head_ranks``, each for some micro-batches.

    Raises ``UserError`` for a size below 1, a pool that does not divide dp x cp, for weights that a pipeline would
    gather again, and for a head dealt without a pipeline.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    virtual_pp: int = 1
    schedule: str = "auto"
    weights: Weights = "auto"
    stage_blocks: tuple[int, ...] | None = None
    pool: int | None = None
    ep: int = 1
    head: Head = "auto"

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if size < 1:
                raise UserError(f"{name} = {size} is not a group size; it must be at least 1")
        if self.dp_cp * self.tp % self.ep:
            raise UserError(
                f"ep = {self.ep} does not divide the {self.dp_cp * self.tp} GPUs of a pipeline stage (dp x cp x tp); "
                "choose a divisor"
            )
        if self.dp_cp % self.pool_size:
            possible = [str(size) for size in divisors(self.dp_cp) if size <= MOST_RANKS]
            given = f"parallel.pool = {self.pool} does not divide dp x cp = {self.dp_cp}"
            raise UserError(f"{given}; give {' or '.join(possible)}, or leave it out")
        if self.pp > 1 and self.weights == "gathered":
            raise UserError(
                f"weights = 'gathered' is for jobs without a pipeline, not for pp = {self.pp}; leave one of them out"
            )
        if self.pp == 1 and self.head == "dealt":
            raise UserError(
                "head = 'dealt' deals the output head to the ranks of a pipeline; raise pp, or leave it out"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that were set; a pool where it is not cp."""
        pool = {} if self.pool_size == self.cp else {"pool": self.pool_size}
        experts = {} if self.ep == 1 else {"ep": self.ep}
        return {name: getattr(self, name) for name in ("tp", "cp", "pp", "dp", "virtual_pp")} | experts | pool

    @property
    def pool_size(self) -> int:
        """The number of ranks that run a micro-batch together."""
        return self.cp if self.pool is None else self.pool

    @property
    def pools(self) -> int:
        """The number of pools of a stage, which run different micro-batches."""
        return self.dp_cp // self.pool_size

    @property
    def ep_ranks(self) -> int:
        """The number of ranks of a stage that share the experts: tensor-parallel groups."""
        return max(1, self.ep // self.tp)

    @property
    def rank_stages(self) -> list[list[int]]:
        """The stages of every pipeline rank: every pp-th stage."""
        return [[*range(rank, self.stages, self.pp)] for rank in range(self.pp)]

    def operations(self, micro_batches: int) -> RankOperations:
        """The operations of every pipeline rank in a step of ``micro_batches``."""
        named = rank_operations(self.schedule, self.pp, micro_batches, self.virtual_pp)
        return dealt_head_lists(named) if self.deals_head else named

    @property
    def deals_head(self) -> bool:
        """Whether several pipeline ranks have the output head, and not only the last stage."""
        return self.head == "dealt"

    @property
    def head_stages(self) -> list[int]:
        """The stages with the output head: the last, or the first of each rank that has it."""
        return [*head_ranks(self.pp)] if self.deals_head else [self.stages - 1]

    @property
    def keeps_weights(self) -> bool:
        """Whether gathered weights stay until the step ends."""
        return self.weights != "gathered"

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def dp_cp(self) -> int:
        """dp x cp: the number of ranks that compute with the same weights."""
        return self.dp * self.cp

    @property
    def stages(self) -> int:
        return self.pp * self.virtual_pp


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def split_layers(shape: ModelShape, layout: Layout) -> list[range]:
    """The blocks of each stage of ``layout``: as ``layout.stage_blocks`` says or, if None, dealt by weight.

    By weight every block counts 1, and an output head on the last stage counts the number of its weights over those of
    a mean block, with only the experts that a token meets. Attention is left out, so the head looks as heavy as it can
    be; the embedding is a lookup and counts 0.

    Raises ``UserError`` if there are fewer blocks than stages.
    """
    if shape.layers < layout.stages:
        raise UserError(
            f"model has {shape.layers} layers, fewer than the {layout.stages} pipeline stages; lower pp or virtual_pp"
        )
    on_last = not layout.deals_head
    head = on_last * shape.vocab_size * shape.hidden / mean_block_weights(shape, active=True)
    counts = layout.stage_blocks or dealt_blocks(shape.layers, layout, head)
    return [range(stop - count, stop) for stop, count in zip(accumulate(counts), counts, strict=True)]


@lru_cache(maxsize=1024)
def dealt_blocks(layers: int, layout: Layout, head: float) -> tuple[int, ...]:
    """The number of ``layers`` blocks on each stage, so that the busiest pipeline rank has the least work.

    The last stage also has the output head, which takes as long as ``head`` blocks. Others have equal numbers; the
    remaining blocks go to later stages, which have fewer micro-batches in flight and hold fewer activations.
    """
    others = layout.stages - 1
    if not others:
        return (layers,)

    def dealt(last: int) -> list[int]:
        starts = [(layers - last) * stage // others for stage in range(layout.stages)]
        return [*(stop - start for start, stop in pairwise(starts)), last]

    def busiest(counts: list[int]) -> tuple[float, float, int]:
        blocks = [*counts[:-1], counts[-1] + head]
        return max(sum(blocks[rank :: layout.pp]) for rank in range(layout.pp)), max(blocks), -counts[-1]

    counts = [dealt(last) for last in range(1, -(-layers // layout.stages) + 1)]
    return tuple(sorted(counts, key=busiest)[0])
