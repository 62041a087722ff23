"""Measured workload profiles: what attention and everything else cost on this device.

``measure`` chooses the sizes and makes the profile, ``workbench`` is the work, ``timing`` measures it in turns, and
``accuracy`` tests the profile on sizes that it has not seen.
"""

from wlb.profiling.accuracy import Accuracy, crossover_tokens, prediction_errors
from wlb.profiling.measure import HeldOutSeconds, ProfileSettings, measure_profile, tensor_parallel_shard

__all__ = [
    "Accuracy",
    "HeldOutSeconds",
    "ProfileSettings",
    "crossover_tokens",
    "measure_profile",
    "prediction_errors",
    "tensor_parallel_shard",
]
