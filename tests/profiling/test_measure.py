"""Profiles measured on this machine: complete, consistent, and of the work they claim; nothing about speed."""

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from wlb.errors import UserError
from wlb.profiling.measure import (
    ProfileSettings,
    held_out_sizes,
    measure_profile,
    prediction_errors,
    profiled_sizes,
    tensor_parallel_shard,
)
from wlb.profiling.workbench import Workbench
from wlb.workload import make_workload, model_shape
from wlb.workload.costs import crossover_tokens
from wlb.workload.profile import read_profile, write_profile
from wlb.workload.shapes import Experts

TINY = model_shape("tiny")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured():
    reports = []
    settings = ProfileSettings(TINY, CPU, torch.float32, max_length=256, tp=2, quick=True)
    profile, held_out = measure_profile(settings, lambda done, total: reports.append((done, total)))
    return profile, held_out, reports


def test_a_measured_profile_survives_its_file_and_prices_more_work_higher(measured, tmp_path):
    profile, _, _ = measured
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]
    workload = read_profile(path)
    lengths = np.arange(1, 600)
    for phase in ("forward", "backward", "both"):
        assert np.all(np.diff(workload.attention_seconds(lengths, phase)) > 0)
        assert np.all(np.diff(workload.linear_seconds(lengths, phase)) >= 0)
        assert np.all(np.diff(workload.piece_seconds(lengths, lengths + 16, phase)) >= 0)
        assert np.all(np.diff(workload.piece_seconds(0 * lengths + 32, lengths + 32, phase)) >= 0)
    assert (profile.version, profile.tp, profile.threads, profile.dtype) == (2, 2, 1, "float32")
    assert profile.clock == "process CPU time"
    assert profile.model == TINY
    assert profile.attention.tokens[-1] == profile.linear.tokens[-1] == 256


def test_what_was_held_out_is_not_in_the_profile(measured):
    profile, held_out, reports = measured
    done, total = zip(*reports, strict=True)
    assert done == tuple(range(1, len(done) + 1))
    assert done[-1] == total[-1]
    assert not set(held_out["documents"]) & set(profile.attention.tokens)
    for seconds in held_out.values():
        assert len(seconds) >= 2
        assert min(seconds.values()) > 0


@pytest.mark.parametrize("max_length", [256, 4096, 131_072])
@pytest.mark.parametrize("quick", [False, True])
def test_sizes_fit_the_longest_document(max_length, quick):
    _, pieces, micro_batches = held_out_sizes(max_length, quick)
    for axis in profiled_sizes(max_length, quick):
        assert list(axis) == sorted(set(axis))
        assert len(axis) >= 2
        assert axis[-1] <= max_length
    assert all(0 < start < stop <= max_length for start, stop in pieces)
    for lengths in micro_batches:
        assert min(lengths) > 0
        assert max_length // 2 <= sum(lengths) <= max_length


def test_errors_are_zero_for_the_workload_that_was_measured_and_as_large_as_its_change():
    documents, pieces, micro_batches = held_out_sizes(4096, quick=False)
    workload = make_workload("tiny", "cpu")
    both = {d: float(workload.attention_seconds(d).sum() + workload.linear_seconds(sum(d))) for d in micro_batches}
    for factor in (1.0, 1.25):
        held_out: dict[str, dict[Any, float]] = {
            "documents": {n: float(workload.attention_seconds([n])[0]) / factor for n in documents},
            "pieces of documents": {(a, b): float(workload.piece_seconds(a, b)) / factor for a, b in pieces},
            "micro-batches": {lengths: seconds / factor for lengths, seconds in both.items()},
        }
        for row in prediction_errors(workload, held_out):
            assert (row["median"], row["worst"]) == pytest.approx((factor - 1, factor - 1))


def test_crossover_is_where_both_parts_meet():
    workload = make_workload("tiny", "cpu")
    length = crossover_tokens(workload)
    assert length is not None
    assert workload.attention_seconds(length) >= workload.linear_seconds(length)
    assert workload.attention_seconds(length - 1) < workload.linear_seconds(length - 1)


def test_the_work_is_the_trainers_own():
    bench = Workbench(TINY, 256, CPU, torch.float64)
    block, _ = bench.case("block", (100, 1, 99))
    linear, _ = bench.case("linear", (200,))
    with_attention, without = block.forward(), linear.forward()
    assert with_attention.shape == without.shape == (200, TINY.hidden)
    assert not torch.equal(with_attention, without)
    for case, out in ((block, with_attention), (linear, without)):
        bench._block.zero_grad()
        case.backward(out)
        assert {name for name, p in bench._block.named_parameters() if p.grad is None} == set()
    case, count = bench.case("documents", (64,))
    out, log_sum_exp = case.forward()
    assert count == 4
    assert out.shape == (256, TINY.heads, TINY.head_dim)
    assert log_sum_exp.shape == (TINY.heads, 256)
    case, count = bench.case("prefix", (32, 128))
    assert count == 2
    assert case.forward()[0].shape == (64, TINY.heads, TINY.head_dim)
    case, share = bench.case("ends", (128,))
    case.backward(case.forward())
    assert share == 1


def test_a_shape_is_divided_by_tp_or_refused():
    assert tensor_parallel_shard(TINY, 2) == replace(TINY, heads=2, kv_heads=1, ffn_hidden=176, vocab_size=256)
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "does not divide the model's kv_heads = 2"),
        ({"kv_heads": 4, "ffn_hidden": 350}, "ffn_hidden = 350"),
        ({"kv_heads": 4, "vocab_size": 511}, "vocab_size = 511"),
        ({"experts": Experts(4, 2, 64)}, "a profile times dense blocks, and the model has experts"),
    ]
    for change, message in refused:
        with pytest.raises(UserError, match=message):
            tensor_parallel_shard(replace(TINY, **change), 4)


NO_MEMORY = torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("error", NO_MEMORY)
def test_too_little_memory_is_said_with_the_remedy(error, monkeypatch):
    monkeypatch.setattr("wlb.profiling.measure.Workbench", mock.Mock(side_effect=error))
    with pytest.raises(UserError, match="too little memory for 256 tokens; lower --max-length"):
        measure_profile(ProfileSettings(TINY, CPU, torch.float32, max_length=256, quick=True))
