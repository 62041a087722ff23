"""What a rank takes from its surroundings: threads, and the type it computes in."""

import hashlib
import os
import platform
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import pytest
import torch

from tests.cases import in_turn
from tests.training.distributed import run_ranks
from tests.training.jobs import job
from wlb.documents.store.reader import TokenStore, TokenStoreWriter
from wlb.errors import UserError
from wlb.job.config import ModelConfig, TrainingConfig
from wlb.job.job import compute_type
from wlb.os_limits import usable_cores
from wlb.training.environment import (
    attention_note,
    hardware_name,
    joined_job,
    keep_freed_memory,
    threads_per_process,
    tokenizer_warning,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_is_the_type_the_device_is_fast_in():
    kinds = [
        (kind, compute_type(TrainingConfig(dtype=kind), device))
        for kind in ("auto", "float32")
        for device in ("cpu", "cuda")
    ]
    assert kinds == [("auto", "float32"), ("auto", "bfloat16"), ("float32", "float32"), ("float32", "float32")]


@in_turn(
    ("gpu", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GH200 480GB", "h100"),  # H100's chip
        ("NVIDIA L4", "h100"),
    ],
)
def test_a_gpu_is_priced_by_its_own_preset(gpu, preset, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: gpu)
    assert hardware_name(CUDA) == preset
    assert hardware_name(CPU) == "cpu"


def test_dense_attention_on_a_gpu_is_told():
    assert attention_note(torch.float32, CPU) is None
    warning = attention_note(torch.float32, CUDA)
    assert warning is not None
    assert "training.dtype = 'float32' on CUDA" in warning


@in_turn(("threads", "variable", "expected"), [(3, "5", 3), (None, "5", 5), (None, "4,2", 4), (None, "many", None)])
def test_threads_are_the_settings_then_the_variables_then_a_share(threads, variable, expected, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: max(5, usable_cores()))
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    config = TrainingConfig(threads=threads)
    assert threads_per_process(config, 1) == (expected or usable_cores())


def test_a_rank_has_no_more_threads_than_the_machine_has_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # set for all machines, larger ones too
    assert threads_per_process(TrainingConfig(), 1) == 4
    assert threads_per_process(TrainingConfig(threads=1_000_000), 1) == 4


def test_a_wrong_number_of_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    refused = r"3 processes were started, but parallel.\* asks for 4 \(dp 2 x pp 2 x cp 1 x tp 1\)"
    with pytest.raises(UserError, match=refused), joined_job(job(tmp_path, parallel={"dp": 2, "pp": 2})):
        pass


def _deterministic_job(folder: Path) -> bool:
    with joined_job(job(folder, training={"deterministic": True})):
        return torch.are_deterministic_algorithms_enabled() and bool(os.environ["CUBLAS_WORKSPACE_CONFIG"])


def test_deterministic_kernels_are_set_on_request(tmp_path):
    with ProcessPoolExecutor(1, get_context("forkserver")) as alone:
        assert alone.submit(_deterministic_job, tmp_path).result()


def test_a_hopper_gpu_without_flash_attention_3_is_told(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert "FlashAttention-2" in (attention_note(torch.bfloat16, CUDA) or "")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    assert attention_note(torch.bfloat16, CUDA) is attention_note(torch.bfloat16, CPU) is None


def _faults_of_a_large_tensor() -> float:
    """The median: something else in the process may take a part of what one tensor freed."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        del os.environ[name]
    keep_freed_memory()
    faults = [0]
    for _ in range(20):
        torch.ones(2**24)  # 64 MiB, or 16,384 pages
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return median(after - before for before, after in pairwise(faults[-10:]))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_what_large_tensors_free_is_kept():
    assert run_ranks(1, _faults_of_a_large_tensor)[0] < 50


def test_a_store_of_another_tokenizer_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    same = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()

    def warning(name: str, sha256: str) -> str | None:
        details = {"tokenizer": {"kind": "huggingface", "name": name, "sha256": sha256}}
        with TokenStoreWriter(tmp_path / name, vocab_size=9) as writer:
            writer.details |= details
            writer.add(torch.arange(9).numpy())
        return tokenizer_warning(ModelConfig(pretrained=tmp_path), TokenStore.open(tmp_path / name))

    assert warning("same", same) is None
    assert "prepared with the tokenizer other, not with" in (warning("other", "0" * 64) or "")


def _growth_over_lengths(folder: Path) -> int:
    """MiB that 400 products of as many shapes leave behind in a job's process."""
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.pop(variable, None)
    with joined_job(job(folder)):
        weight = torch.ones(128, 128, dtype=torch.bfloat16)
        before = _resident_mib()
        for length in range(200, 600):
            torch.ones(length, 128, dtype=torch.bfloat16) @ weight
        return _resident_mib() - before


def _resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_every_new_length(tmp_path):
    with ProcessPoolExecutor(1, get_context("forkserver")) as alone:
        assert alone.submit(_growth_over_lengths, tmp_path).result() < 100
