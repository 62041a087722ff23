"""What documents and micro-batches cost, in predicted seconds.

``make_workload`` prices a model on a GPU, by counting or from measurements (``wlb.workload.profile``).
"""

from typing import TYPE_CHECKING

from wlb.workload.costs import Costs
from wlb.workload.hardware import HARDWARE, Hardware, hardware_preset
from wlb.workload.published import MODEL_SHAPES, model_shape
from wlb.workload.shapes import ModelShape

if TYPE_CHECKING:
    from wlb.workload.profile import WorkloadProfile

__all__ = ["HARDWARE", "MODEL_SHAPES", "Costs", "Hardware", "ModelShape", "make_workload", "model_shape"]


def make_workload(
    model: str | ModelShape = "7b",
    hardware: str | Hardware = "h100",
    tp: int = 1,
    cp: int = 1,
    profile: "WorkloadProfile | None" = None,
) -> Costs:
    """Price ``model`` (a preset or any shape) on ``hardware`` (a preset or any rates), on tp x cp GPUs.

    A measured ``profile`` of the model replaces the terms that it measured. Raises ``UserError`` for an unknown preset,
    a size below 1, a ``tp`` that does not divide the heads, and a profile of another model.
    """
    shape = model_shape(model) if isinstance(model, str) else model
    rates = hardware_preset(hardware) if isinstance(hardware, str) else hardware
    return Costs(shape, rates, tp, cp, profile=profile)
