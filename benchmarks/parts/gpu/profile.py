"""W_a and W_l of one block by the code of ``wlb profile``, and sizes that the profile has not seen."""

import torch

from benchmarks.parts.gpu.setting import Comparison, Result, Setting, Workloads
from wlb.profiling.measure import ProfileSettings, measure_profile, predictions
from wlb.workload import make_workload
from wlb.workload.costs import crossover_tokens

PROFILE = "profile"  # its name among the workloads


def profile(setting: Setting, workloads: Workloads) -> Result:
    device = torch.device(setting.device)
    settings = ProfileSettings(setting.shape, device, setting.dtype, setting.max_length, quick=setting.quick)
    measured, held_out = measure_profile(settings)
    everyone = {**workloads, PROFILE: make_workload(setting.shape, profile=measured)}
    rows = [{"workload": name, "crossover_tokens": crossover_tokens(workload)} for name, workload in everyone.items()]
    predicted = {name: predictions(workload, held_out) for name, workload in everyone.items()}
    comparisons = [
        Comparison(kind, [*seconds.values()], {name: [*map(float, of[kind])] for name, of in predicted.items()})
        for kind, seconds in held_out.items()
    ]
    return Result(rows, comparisons, profile=measured)
