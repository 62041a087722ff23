"""Model FLOPs utilisation: what the model's arithmetic needs, over what the devices could do in the time.

As PaLM defines it (arXiv 2204.02311, appendix B): the operations of the model's products once forward and twice
backward, whatever an implementation recomputes, here with causal attention inside segments counted by its pairs. The
peak is the hardware preset's, in bfloat16 on a GPU and float32 on a CPU. That of a CPU is for one core, so a rank has
as many as threads.
"""

from __future__ import annotations

import torch

from wlb.packing.plan import StepPlan
from wlb.workload import ModelShape, attention_flops, hardware_preset, linear_flops

_PASSES = 3.0  # one forward, and a backward of twice its operations


def model_flops(shape: ModelShape, plan: StepPlan) -> float:
    """Operations that training on the step's segments takes, over all ranks."""
    lengths = [segment.length for segment in plan.segments]
    attention = float(attention_flops(shape, lengths, "forward").sum())
    return _PASSES * (attention + float(linear_flops(shape, plan.tokens, "forward")))


def peak_flops(hardware: str, device: torch.device) -> float:
    """FLOP/s of one rank on ``device`` at best, by the preset ``hardware``."""
    cores = torch.get_num_threads() if device.type == "cpu" else 1
    return hardware_preset(hardware).peak_flops * cores
