"""Handles steps whose loss or gradient norm is not finite: names their documents, then skips or stops.

Every rank finds such a step at the same time, as loss and norm are global. The ranks of the last pipeline stage then
say which of their micro-batches have a loss that is not finite, and their documents are named first. Under
``training.non_finite = "skip"`` weights and optimizer state stay as they were before the step, which counts as
trained: its documents do not come again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from wlb.job.config import TrainingConfig
from wlb.packing.plan import StepPlan
from wlb.runtime.collectives import gathered
from wlb.training.data.loader import micro_batches_of
from wlb.training.failures import TrainingError

_DOCUMENTS_NAMED = 50  # of each kind, in the message


class NonFiniteSteps:
    """What to do with steps of a job that are not finite, and how many of them came in a row; used by every rank."""

    def __init__(self, config: TrainingConfig, dp_rank: int, cp_rank: int = 0) -> None:
        self._policy = config.non_finite
        self._most = config.max_skipped
        self._dp_rank, self._cp_rank = dp_rank, cp_rank
        self._in_a_row = 0

    def check(self, step: int, loss: float, grad_norm: float, plan: StepPlan, losses: Sequence[Tensor]) -> str | None:
        """None if the step may change the weights, or else a line that says why it is skipped.

        ``losses`` are those of this rank's micro-batches, on ranks of the last pipeline stage. Raises ``TrainingError``
        if steps are not to be skipped, or after ``training.max_skipped`` in a row.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._in_a_row = 0
            return None
        mine = micro_batches_of(plan, self._dp_rank, self._cp_rank)  # the loss of one without tokens may follow
        found = [
            (self._dp_rank, index) for index, value in zip(mine, losses, strict=False) if not torch.isfinite(value)
        ]
        guilty = sorted({place for places in gathered(found) for place in places})
        problem = f"step {step}: loss is {loss} and gradient norm {grad_norm}; {_blame(plan, guilty)}"
        if self._policy == "stop":
            raise TrainingError(problem)
        self._in_a_row += 1
        if self._in_a_row > self._most:
            raise TrainingError(f"{problem}; the {self._most} steps before it (training.max_skipped) were skipped too")
        return f"wlb: warning: skipped {problem}"


def _blame(plan: StepPlan, guilty: Sequence[tuple[int, int]]) -> str:
    everything = {segment.document for segment in plan.segments}
    blamed = {segment.document for dp_rank, index in guilty for segment in plan.ranks[dp_rank][index].segments}
    if not blamed:
        return f"every micro-batch has a finite loss; its documents are {_named(everything)}"
    others = everything - blamed
    rest = f"; its other documents are {_named(others)}" if others else ""
    return f"not finite in the micro-batches of documents {_named(blamed)}{rest}"


def _named(documents: Iterable[int]) -> str:
    ordered = sorted(documents)
    more = f" and {len(ordered) - _DOCUMENTS_NAMED} more" if len(ordered) > _DOCUMENTS_NAMED else ""
    return ", ".join(map(str, ordered[:_DOCUMENTS_NAMED])) + more
