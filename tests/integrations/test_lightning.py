"""The loss for Lightning counts the labelled tokens of the trainer's step, and undoes what Lightning divides by."""

from __future__ import annotations

import pytest
import torch

from wlb.batches import PlannedBatchSampler
from wlb.errors import UserError
from wlb.integrations.lightning import LightningLoss
from wlb.integrations.packed import packed_loss

LENGTHS = [20, 3, 9, 14, 7, 30, 11, 5]


def test_a_steps_losses_are_its_sum_over_its_labelled_tokens():
    sampler = PlannedBatchSampler(LENGTHS, context_window=32, micro_batches=2, model="tiny", epochs=2)
    loss = LightningLoss(sampler, accumulate_grad_batches=2)
    logits, labels = torch.randn(6, 10), torch.randint(0, 10, (6,))
    plans = list(sampler.steps())
    for step in (1, 0, len(plans) - 1):  # a resumed trainer begins anywhere
        labelled = sum(segment.length - 1 for segment in plans[step].segments)
        torch.testing.assert_close(loss(logits, labels, step), 2 * packed_loss(logits, labels, labelled))
    with pytest.raises(UserError, match="max_epochs=1"):
        loss(logits, labels, len(plans))
