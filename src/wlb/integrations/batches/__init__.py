"""Planned micro-batches for other trainers: the documents that each rank trains next."""

from wlb.integrations.batches.sampler import PlannedBatchSampler
from wlb.integrations.batches.steps import ItemsOfSteps, balanced_job

__all__ = ["ItemsOfSteps", "PlannedBatchSampler", "balanced_job"]
