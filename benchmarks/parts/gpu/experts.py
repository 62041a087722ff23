"""A layer of experts on one device: one kernel for all of them beside a product for each, and how exact both are."""

from statistics import median
from unittest import mock

import torch

import wlb.models.experts as layer
from benchmarks.parts.gpu.setting import Result, Row, Setting, Workloads
from benchmarks.parts.gpu.steps import now
from wlb.models.experts import GroupedExperts
from wlb.workload.shapes import Experts

COUNTS, ACTIVE, SHARE = (8, 32, 128), 8, 4  # experts here, of a token, and the width of a dense layer over an expert's
KERNELS = {"grouped": True, "one by one": False}


def experts(setting: Setting, workloads: Workloads) -> Result:
    """Seconds of forward and backward with even experts, and the largest error over float64, in root mean squares."""
    return Result([row for count in COUNTS for row in _layer(setting, count)])


def _layer(setting: Setting, count: int) -> list[Row]:
    device, hidden = torch.device(setting.device), setting.trained.hidden
    torch.manual_seed(setting.seed)
    shape = Experts(count, min(count, ACTIVE), setting.trained.ffn_hidden // SHARE)
    module = GroupedExperts(hidden, shape).to(device, setting.dtype)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    rows = setting.trained_tokens * shape.active
    counts = torch.full((count,), rows // count, device=device)
    x = torch.randn(int(counts.sum()), hidden, device=device, dtype=setting.dtype, requires_grad=True)
    with torch.no_grad():
        some = x[: int(counts[0])]  # of the first expert
        exact = _swiglu(some.double(), *(w.double().unflatten(0, (count, -1))[0] for w in module.parameters()))
    found: list[Row] = []
    for name, groups in KERNELS.items():
        seconds = []
        with mock.patch.object(layer, "_can_group", return_value=groups):
            for _ in range(1 + setting.rounds):
                began = now(device)
                out = module(x, counts)
                out.backward(torch.ones_like(out))
                seconds.append(now(device) - began)
        error = float((out.detach()[: len(some)].double() - exact).abs().max() / exact.square().mean().sqrt())
        flops = 3 * 3 * 2.0 * len(x) * hidden * shape.ffn_hidden
        took = median(seconds[1:])
        found.append({"experts": count, "kernel": name, "seconds": took, "tflops": flops / took / 1e12, "error": error})
    return found


def _swiglu(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
