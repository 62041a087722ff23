"""Running plans in any loop, without the trainer: a rank's own list of batches, level steps, pipelines of any module.

``own_lists`` has lists and steps, ``stage`` pipelines, ``sharded_batch`` tensors, ``calibration`` measured prices.
"""

from wlb.runtime.own_lists import level_step, own_batches

__all__ = ["level_step", "own_batches"]
