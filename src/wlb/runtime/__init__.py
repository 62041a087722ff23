"""Running plans in any loop, without the trainer: a rank's own list of batches, level steps, pipelines.

``own_lists`` has the lists and the step (``own_batches``, ``level_step``), ``stage`` pipeline stages for micro-batches
of any length (``variable_length_stage``, ``run_order``), ``batch`` and ``sharded_batch`` the tensors of a micro-batch
and of one rank's part of it.
"""

from wlb.runtime.own_lists import level_step, own_batches

__all__ = ["level_step", "own_batches"]
