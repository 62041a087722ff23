"""Lightning: a planned batch sampler for the data loader, and the loss that goes with it.

    trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=4, use_distributed_sampler=False, ...)

Lightning's own distributed sampler has to stay off, as ``PlannedBatchSampler(rank=...)`` deals already, and all epochs
are one pass of the sampler. In automatic optimisation Lightning divides every loss by ``accumulate_grad_batches``, and
DDP and FSDP average gradients over all processes; both are undone here, so that a step's loss is the sum over its
labelled tokens divided by their number.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from wlb.batches import PlannedBatchSampler
from wlb.errors import UserError
from wlb.integrations.packed import packed_loss


class LightningLoss:
    """The loss of a planned micro-batch, for ``training_step`` of a ``LightningModule`` with automatic optimisation.

    ``sampler`` is the one of the train loader, whose plans say how many labelled tokens a step has: all tokens of a
    document but one. Where prompts are masked, use ``packed_loss`` with a count of the step's labels. Steps are those
    of the trainer, so a run that is resumed goes on with the right counts.
    """

    def __init__(self, sampler: PlannedBatchSampler, accumulate_grad_batches: int) -> None:
        self._plans = sampler.steps()
        self._counts: list[int] = []  # labelled tokens of each step so far
        self._scale = accumulate_grad_batches

    def __call__(self, logits: Tensor, labels: Tensor, global_step: int) -> Tensor:
        """Of logits (tokens, vocabulary) and labels (tokens,) to predict there, in the trainer's ``global_step``."""
        while len(self._counts) <= global_step:
            plan = next(self._plans, None)
            if plan is None:
                raise UserError(
                    f"step {global_step} is after the last of the sampler's pass; give the sampler all epochs, and the "
                    "trainer max_epochs=1"
                )
            self._counts.append(sum(segment.length - 1 for segment in plan.segments))
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return packed_loss(logits, labels, self._counts[global_step], averaged_over=ranks * self._scale)
