"""W_a and W_l of one block by the code of ``wlb profile``, and sizes that the profile has not seen.

It measures for about a minute, or some seconds at toy sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from parts.gpu.setting import Comparison, Result, Setting, Workloads
from wlb.profiling import ProfileSettings, crossover_tokens, measure_profile
from wlb.profiling.accuracy import HeldOutSeconds, micro_batch_seconds
from wlb.workload import Workload

PROFILE = "profile"  # its name among the workloads


def profile(setting: Setting, workloads: Workloads) -> Result:
    measured, held_out = measure_profile(
        ProfileSettings(
            setting.shape, torch.device(setting.device), setting.dtype, setting.max_length, quick=setting.quick
        )
    )
    everyone = {**workloads, PROFILE: measured.workload()}
    rows = [{"workload": name, "crossover_tokens": crossover_tokens(workload)} for name, workload in everyone.items()]
    return Result(rows, _comparisons(everyone, held_out), profile=measured)


def _comparisons(workloads: Workloads, held_out: HeldOutSeconds) -> list[Comparison]:
    sizes = held_out.sizes
    starts, stops = np.array(sizes.pieces).T

    def compare(what: str, measured: Sequence[float], predict: Any) -> Comparison:
        return Comparison(
            what, list(measured), {name: list(map(float, predict(workload))) for name, workload in workloads.items()}
        )

    def documents(workload: Workload) -> Any:
        return workload.attention_seconds(sizes.documents)

    def pieces(workload: Workload) -> Any:
        return workload.piece_seconds(starts, stops)

    def micro_batches(workload: Workload) -> Any:
        return [micro_batch_seconds(workload, lengths) for lengths in sizes.micro_batches]

    return [
        compare("attention of documents", held_out.documents, documents),
        compare("attention of pieces", held_out.pieces, pieces),
        compare("micro-batches", held_out.micro_batches, micro_batches),
    ]
