"""Runs plans in any loop, without the trainer: the batches of a rank, level steps, and pipelines of any module.

``own_lists`` has batches and steps, ``stage`` pipelines, ``sharded_batch`` tensors, ``calibration`` measured prices.
"""

from wlb.runtime.own_lists import level_step, own_batches

__all__ = ["level_step", "own_batches"]
