"""Running plans in any loop, without the trainer: a rank's own list of batches, level steps, pipelines of any module.

``own_lists`` has lists and steps, ``stage`` pipelines, ``batch`` and ``sharded_batch`` the tensors of a micro-batch;
``calibration`` measures what steps cost on each rank.
"""

from wlb.runtime.own_lists import level_step, own_batches

__all__ = ["level_step", "own_batches"]
