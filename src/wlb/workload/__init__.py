"""What a document and a micro-batch cost: W_a and W_l, in predicted seconds.

``make_workload`` computes prices from a model's shape and a GPU's rates, ``wlb.workload.profile.load_profile`` reads
measured ones.
"""

from __future__ import annotations

from functools import lru_cache

from wlb.workload.analytic import AnalyticWorkload, analytic_workload
from wlb.workload.base import Phase, Seconds, Workload
from wlb.workload.flops import attention_flops, linear_flops
from wlb.workload.hardware import HARDWARE, Hardware, hardware_preset
from wlb.workload.published import MODEL_SHAPES, model_shape
from wlb.workload.shapes import ModelShape

__all__ = [
    "HARDWARE",
    "MODEL_SHAPES",
    "AnalyticWorkload",
    "Hardware",
    "ModelShape",
    "Phase",
    "Seconds",
    "Workload",
    "attention_flops",
    "default_workload",
    "linear_flops",
    "make_workload",
    "model_shape",
]


def make_workload(
    model: str | ModelShape = "7b", hardware: str | Hardware = "h100", tp: int = 1, cp: int = 1
) -> AnalyticWorkload:
    """Price ``model`` (a preset or any shape) on ``hardware`` (a preset or any rates), on tp x cp GPUs.

    Raises ``UserError`` for an unknown preset, a size below 1, and where ``tp`` does not divide the heads.
    """
    shape = model_shape(model) if isinstance(model, str) else model
    rates = hardware_preset(hardware) if isinstance(hardware, str) else hardware
    return analytic_workload(shape, rates, tp, cp)


@lru_cache(maxsize=1)
def default_workload() -> AnalyticWorkload:
    """The 7B model on one H100: prices where none are given, computed once."""
    return make_workload()
