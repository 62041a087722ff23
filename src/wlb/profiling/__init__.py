"""Measured workload profiles: what attention and everything else cost on this device.

``sizes`` says what is measured, ``workbench`` is the work, ``timing`` measures it in turns, ``measure`` makes the
profile of it, and ``accuracy`` tests the profile on sizes that it has not seen.
"""

from wlb.profiling.accuracy import Accuracy, HeldOut, crossover_tokens, prediction_errors
from wlb.profiling.measure import ProfileSettings, measure_profile, tensor_parallel_shard

__all__ = [
    "Accuracy",
    "HeldOut",
    "ProfileSettings",
    "crossover_tokens",
    "measure_profile",
    "prediction_errors",
    "tensor_parallel_shard",
]
