"""What a dry run leaves out of a rank's attention changes nothing that it counts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
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


lengths = st.sampled_from([1, 3, 17, 60, 130, 300, 700])


@given(st.lists(st.tuples(lengths, lengths), max_size=6), st.booleans(), st.sampled_from([None, 8, 200]))
def test_the_longest_runs_hold_as_much_as_all(runs: list[tuple[int, int]], causal: bool, window: int | None):
    queries = tuple(queries for queries, _ in runs)
    keys = tuple(queries + before if causal else before for queries, before in runs)
    drawn = Runs(queries, keys, causal, window if causal else None)
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
