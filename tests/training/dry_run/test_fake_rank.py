"""What a dry run leaves out of a rank's attention changes nothing that it counts."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wlb.attention.backends import BACKENDS
from wlb.attention.runs import Runs
from wlb.training.dry_run.calls import CallLog
from wlb.training.dry_run.fake_rank import StepWatcher, longest_runs_of_attention
from wlb.training.dry_run.meter import MemoryMeter

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def bytes_and_operators(runs: Runs) -> tuple[dict[str, int], dict[str, int], int]:
    """The peaks of forward and backward, and the number of operators."""
    meter = MemoryMeter()
    queries, keys = sum(runs.query_lengths), sum(runs.key_lengths)
    with StepWatcher(meter, CallLog()) as watcher, FakeTensorMode():
        query, grad = (torch.empty(queries, HEADS, HEAD_DIM) for _ in range(2))
        key, value = (torch.empty(keys, KV_HEADS, HEAD_DIM) for _ in range(2))
        results = BACKENDS["cpu"].forward(query, key, value, runs)
        forward = dict(meter.peak)
        meter.forget_peak()
        BACKENDS["cpu"].backward(grad, query, key, value, *results, runs)
    return forward, dict(meter.peak), watcher.operators


@pytest.mark.parametrize(
    "runs",
    [
        Runs.of_segments((30, 5, 500, 34)),
        Runs.of_segments((30, 5, 500, 34), window=200),
        Runs((30, 34, 3), (7, 50, 9), causal=False),
    ],
    ids=["own", "window", "received"],
)
def test_the_longest_runs_hold_as_much_as_all(runs: Runs):
    *of_all, operators = bytes_and_operators(runs)
    with longest_runs_of_attention():
        *of_longest, fewer_operators = bytes_and_operators(runs)
    assert of_longest == of_all
    assert fewer_operators < operators
