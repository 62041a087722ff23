"""What a document and a micro-batch cost: W_a and W_l, in predicted seconds.

``make_workload`` computes prices from a model's shape and a GPU's rates, ``load_profile`` reads measured ones.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

from wlb.workload.analytic import AnalyticWorkload, analytic_workload
from wlb.workload.base import Phase, Seconds, Workload
from wlb.workload.flops import attention_flops, linear_flops
from wlb.workload.hardware import HARDWARE, Hardware, hardware_preset
from wlb.workload.published import MODEL_SHAPES, model_shape
from wlb.workload.shapes import ModelShape

if TYPE_CHECKING:  # importing it needs more than NumPy, which ``wlb.balance`` does without
    from wlb.workload.profile import ProfileWorkload, load_profile

__all__ = [
    "HARDWARE",
    "MODEL_SHAPES",
    "AnalyticWorkload",
    "Hardware",
    "ModelShape",
    "Phase",
    "ProfileWorkload",
    "Seconds",
    "Workload",
    "attention_flops",
    "default_workload",
    "linear_flops",
    "load_profile",
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


if not TYPE_CHECKING:  # a type checker sees the import above

    def __getattr__(name: str) -> object:
        if name not in ("ProfileWorkload", "load_profile"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module("wlb.workload.profile"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
