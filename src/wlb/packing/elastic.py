"""Every step trains exactly its global batch: no document is delayed or trained early.

The documents that begin in a global batch of the stream are trained whole in its step, so steps differ in tokens by
less than a document. They are even without a queue because a micro-batch runs on a pool of ranks, and holds several
context windows: documents dealt longest first come out even, but for one that is dearer than the mean micro-batch.
``max_delay`` lets such a document wait for a step in which others are as dear, by the rules of ``makespan``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from wlb.packing.makespan import MakespanOptions, MakespanPacker
from wlb.packing.packer import PackingTask
from wlb.settings import NonNegativeInt, Number, PositiveInt

_LENGTH_FACTOR = 2.0  # L_max over the mean micro-batch: short documents alone are more tokens for the same seconds


class ElasticOptions(MakespanOptions):
    """Options of ``elastic``: those of ``makespan``, with defaults that move no document to another step."""

    max_length_factor: Annotated[Number, Field(ge=1, le=1000)] | Literal["auto"] = "auto"
    max_delay: NonNegativeInt = 0
    lookahead: Number = Field(0.0, ge=0, le=1)
    global_batch: PositiveInt | None = Field(
        None, description="Context windows that a step trains; default: as many as micro_batches"
    )
    pool_micro_batches: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="Micro-batches that each pool runs in a step; auto is the number that is fastest by simulation",
    )

    def largest_auto_factor(self, micro_batches: int) -> float:
        """Twice the mean micro-batch, and room beside that for one document."""
        mean = (self.global_batch or micro_batches) / micro_batches
        return max(_LENGTH_FACTOR * mean, mean + 1)

    def most_tokens(self, context_window: int, micro_batches: int) -> int:
        if self.max_length_factor == "auto":
            return math.ceil(self.largest_auto_factor(micro_batches) * context_window)
        return super().most_tokens(context_window, micro_batches)

    def identity(self, context_window: int) -> dict[str, Any]:
        """As for every packer, but for sizes: no document waits that was measured by them."""
        free = ("pool_micro_batches", "global_batch", "max_length_factor")
        return {key: value for key, value in super().identity(context_window).items() if key not in free}


class ElasticPacker(MakespanPacker):
    """Micro-batches of equal workload, whose documents are those of one global batch of the stream.

    A global batch is ``global_batch`` context windows, whatever the number of micro-batches.
    """

    name = "elastic"
    options_class = ElasticOptions

    def __init__(self, task: PackingTask, options: ElasticOptions) -> None:
        self._global_batch = options.global_batch
        super().__init__(task, options)
        self._least_documents = 1  # of a step; a micro-batch may be empty, rather than train what is not due

    @property
    def global_batch_tokens(self) -> int:
        return (self._global_batch or self.micro_batches) * self.context_window
