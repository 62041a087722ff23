"""What any loop sets for GPUs, once, and what comes too late; with a fake of CUDA."""

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.training.distributed import run_ranks
from wlb.runtime import environment
from wlb.runtime.environment import set_up_gpu

ALLOCATOR, ORDER = "PYTORCH_ALLOC_CONF", "NCCL_LAUNCH_ORDER_IMPLICIT"
SET = f"wlb: set {ALLOCATOR}=expandable_segments:True, {ORDER}=1"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with a Hopper GPU whose settings are those of a new process; ``settings`` is the allocator's."""
    fake = SimpleNamespace(started=False, settings="", flash=None, device=None)
    for name in (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF", ORDER, "RANK"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "_done", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: fake.started)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(fake, "device", device))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: fake.settings, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda text: setattr(fake, "settings", text))
    monkeypatch.setattr(environment, "current_flash_attention_impl", lambda: fake.flash)
    monkeypatch.setattr(environment, "activate_flash_attention_impl", lambda kind: setattr(fake, "flash", kind))
    return fake


def said(**arguments: Any) -> list[str]:
    lines: list[str] = []
    with mock.patch.object(environment, "tell", lines.append):
        set_up_gpu(**arguments)
    return lines


def test_everything_is_set_and_said_once(cuda):
    assert said() == [SET]  # by ``balanced``, before CUDA starts
    assert (cuda.settings, os.environ[ALLOCATOR], os.environ[ORDER]) == (*["expandable_segments:True"] * 2, "1")
    assert not cuda.flash  # to ask for the GPU's kind would start CUDA
    cuda.started = True
    assert said() == ["wlb: set FlashAttention 3"]
    assert said() == []
    assert cuda.flash == "FA3"


def test_a_trainer_starts_its_device(cuda):
    assert said(device=torch.device("cuda", 3)) == [f"{SET}, FlashAttention 3"]
    assert cuda.device == torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [(ALLOCATOR, ""), ("PYTORCH_CUDA_ALLOC_CONF", "b:2"), (ORDER, "0"), ("settings", "c:3"), ("flash", "FA4")],
)
def test_what_the_user_set_stays(name, value, cuda, monkeypatch):
    cuda.started = True
    if hasattr(cuda, name):
        setattr(cuda, name, value)
    else:
        monkeypatch.setenv(name, value)
    (line,) = said()
    named = {"settings": ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR, "flash": "FlashAttention"}.get(name, name)
    assert named not in line
    assert (os.environ | vars(cuda)).get(name) == value


class Group:
    """A process group whose back end for CUDA has begun, or which has none."""

    def __init__(self, *begun: bool) -> None:
        self._begun = begun

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        if not self._begun:
            raise RuntimeError(f"no back end for {device}")
        return SimpleNamespace(_is_initialized=lambda: self._begun[0])


@pytest.mark.parametrize(
    ("groups", "late"), [([Group()], False), ([Group(False)], False), ([Group(), Group(True)], True)]
)
def test_nccl_that_has_begun_is_told(groups, late, cuda, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
    cuda.started, cuda.flash = True, "FA3"
    warning = f"wlb: warning: NCCL has begun; export {ORDER}=1 before the job starts, or ranks may deadlock"
    assert said() == ([SET.partition(", ")[0], warning] if late else [SET])
    assert (ORDER in os.environ) != late


def test_one_communicator_needs_no_order(cuda, monkeypatch):
    monkeypatch.setattr(environment, "_nccl_has_begun", lambda: True)
    assert said(shares=False) == [SET.partition(", ")[0]]


def _begun() -> bool:
    return environment._nccl_has_begun()


def test_gloo_is_not_nccl():
    assert run_ranks(1, _begun) == [False]


def test_only_one_rank_says_it(cuda, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert said() == []
    assert os.environ[ORDER] == "1"


def test_without_cuda_nothing_happens(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = dict(os.environ)
    assert said() == []
    assert (dict(os.environ), cuda.settings, cuda.flash) == (before, "", None)
