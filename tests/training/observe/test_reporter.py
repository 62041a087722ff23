"""Model FLOPs against a count of every product's operations, product by product."""

from __future__ import annotations

import pytest
import torch

from wlb.documents.segments import Segment
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.training.observe.reporter import model_flops, peak_flops
from wlb.workload import HARDWARE, ModelShape


def test_flops_of_a_step_count_every_product_once_forward_and_twice_backward():
    shape = ModelShape(hidden=8, layers=3, heads=4, kv_heads=2, head_dim=6, ffn_hidden=10, vocab_size=50)
    segments = [Segment(0, 0, 5), Segment(1, 2, 7)]
    plan = StepPlan(1, ((MicroBatch((segments[0],), 1.0),), (MicroBatch((segments[1],), 1.0),)))
    weights = 3 * (8 * 24 + 2 * 8 * 12 + 24 * 8 + 3 * 8 * 10) + 8 * 50
    pairs = sum(query + 1 for segment in segments for query in range(segment.length))  # keys up to and with its own
    forward = 2 * weights * 12 + 3 * 2 * (2 * 4 * 6) * pairs
    assert model_flops(shape, plan) == pytest.approx(3 * forward)


def test_a_cpu_has_a_peak_per_thread():
    peak = peak_flops("cpu", torch.device("cpu"))
    assert peak == HARDWARE["cpu"].peak_flops * torch.get_num_threads()
    assert peak_flops("h100", torch.device("cuda")) == HARDWARE["h100"].peak_flops
