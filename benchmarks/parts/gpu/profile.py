"""W_a and W_l of one block by the code of ``wlb profile``, and sizes that the profile has not seen.

It measures for about a minute, or some seconds at toy sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.parts.gpu.setting import Comparison, Result, Setting, Workloads
from wlb.profiling import ProfileSettings, crossover_tokens, measure_profile
from wlb.profiling.accuracy import HeldOutSeconds, micro_batch_seconds
from wlb.workload import Costs, make_workload

PROFILE = "profile"  # its name among the workloads


def profile(setting: Setting, workloads: Workloads) -> Result:
    device = torch.device(setting.device)
    settings = ProfileSettings(setting.shape, device, setting.dtype, setting.max_length, quick=setting.quick)
    measured, held_out = measure_profile(settings)
    everyone = {**workloads, PROFILE: make_workload(setting.shape, profile=measured)}
    rows = [{"workload": name, "crossover_tokens": crossover_tokens(workload)} for name, workload in everyone.items()]
    return Result(rows, _comparisons(everyone, held_out), profile=measured)


def _comparisons(workloads: Workloads, held_out: HeldOutSeconds) -> list[Comparison]:
    sizes = held_out.sizes
    starts, stops = np.array(sizes.pieces).T

    def compare(what: str, measured: Sequence[float], predict: Callable[[Costs], Any]) -> Comparison:
        predicted = {name: [float(one) for one in predict(workload)] for name, workload in workloads.items()}
        return Comparison(what, list(measured), predicted)

    return [
        compare("attention of documents", held_out.documents, lambda w: w.attention_seconds(sizes.documents)),
        compare("attention of pieces", held_out.pieces, lambda w: w.piece_seconds(starts, stops)),
        compare(
            "micro-batches",
            held_out.micro_batches,
            lambda w: [micro_batch_seconds(w, lengths) for lengths in sizes.micro_batches],
        ),
    ]
