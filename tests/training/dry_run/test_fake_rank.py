"""What a dry run leaves out of a rank's attention changes nothing that it counts."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from wlb.attention.backends import BACKENDS
from wlb.attention.runs import Runs
from wlb.training.dry_run.calls import CallLog
from wlb.training.dry_run.fake_rank import StepWatcher, longest_runs_of_attention
from wlb.training.dry_run.meter import MemoryMeter

HEADS, KV_HEADS, HEAD_DIM = 8, 1, 8  # a query's gradient is of another size than those of a key and value


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


lengths = st.sampled_from([1, 3, 17, 60, 130, 300, 700])


@given(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=6), st.sampled_from(["own", "window", "received"]))
@example([(1, 300), (60, 60), (300, 1)], "received")
@example([(17, 1), (300, 1), (60, 17), (17, 300)], "received")
def test_the_longest_runs_hold_as_much_as_all(runs: list[tuple[int, int]], kind: str):
    queries, keys = zip(*runs, strict=True)
    drawn = {
        "own": Runs.of_segments(queries),
        "window": Runs.of_segments(queries, window=200),
        "received": Runs(queries, keys, causal=False),
    }[kind]
    *of_all, _ = bytes_and_operators(drawn)
    with longest_runs_of_attention():
        *of_longest, _ = bytes_and_operators(drawn)
    assert of_longest == of_all


def test_only_two_of_many_runs_are_attended():
    many = Runs.of_segments((30, 5, 500, 34) * 9)
    *_, operators = bytes_and_operators(many)
    with longest_runs_of_attention():
        *_, fewer = bytes_and_operators(many)
    assert fewer < operators / 4
