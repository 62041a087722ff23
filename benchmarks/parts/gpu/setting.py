"""Sizes of the GPU suite, for one H100 and toy ones that try the same code on a CPU, and what a section returns.

Times are those of one transformer block on one device. All of a section's work takes turns (``measure_in_turns``).
"""

import sys
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from wlb.attention.backends import BACKENDS, AttentionBackend
from wlb.profiling.timing import Case, Timing, measure_in_turns
from wlb.profiling.workbench import Workbench
from wlb.runtime.clock import PROCESS_TIME, clock_of
from wlb.workload import Costs, ModelShape, model_shape
from wlb.workload.profile import WorkloadProfile

Row = dict[str, Any]
Workloads = Mapping[str, Costs]  # that predict, by name
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Setting:
    """Sizes in tokens; a section measures all of its work in each of ``rounds``."""

    device: str
    dtype: torch.dtype
    model: str
    exact_tokens: int
    kernel_documents: tuple[int, ...]
    kernel_queries: tuple[int, ...]
    kernel_keys: tuple[int, ...]
    max_length: int
    sharded_window: int
    sharded_micro_batches: int
    cp_sizes: tuple[int, ...]
    trained: ModelShape
    trained_tokens: int
    rounds: int
    quick: bool
    seed: int = 0

    @property
    def shape(self) -> ModelShape:
        return model_shape(self.model)

    @property
    def backend(self) -> AttentionBackend:
        return BACKENDS[self.device]

    def workbench(self, shape: ModelShape, max_tokens: int) -> Workbench:
        return Workbench(shape, max_tokens, torch.device(self.device), self.dtype)


H100 = Setting(
    device="cuda",
    dtype=torch.bfloat16,
    model="7b",
    exact_tokens=4096,
    kernel_documents=(256, 1024, 4096, 16_384, 65_536, 131_072),
    kernel_queries=(16, 64, 128, 129, 192, 256, 512, 2048, 8192, 32_768),
    kernel_keys=(1024, 8192, 32_768, 131_072),
    max_length=131_072,
    sharded_window=131_072,
    sharded_micro_batches=4,
    cp_sizes=(2, 4, 8, 16),
    # 1.1 billion weights, whose training state takes 17 GB
    trained=ModelShape(hidden=2048, layers=20, heads=16, kv_heads=8, head_dim=128, ffn_hidden=5632, vocab_size=32_000),
    trained_tokens=16_384,
    rounds=3,
    quick=False,
)
TOY = Setting(
    device="cpu",
    dtype=torch.float32,
    model="tiny",
    exact_tokens=128,
    kernel_documents=(32, 128),
    kernel_queries=(16, 48),
    kernel_keys=(64, 128),
    max_length=256,
    sharded_window=512,
    sharded_micro_batches=2,
    cp_sizes=(2, 4),
    trained=model_shape("tiny"),
    trained_tokens=256,
    rounds=1,
    quick=True,
)


def attention_kernels(setting: Setting) -> Iterator[str]:
    """The names of the attention kernels that this device has, each while it is the one that runs."""
    yield "default"
    if setting.device == "cuda" and torch.cuda.get_device_capability()[0] == 9:
        try:
            activate_flash_attention_impl("FA3")
        except (ImportError, RuntimeError) as error:
            print(f"FlashAttention 3 is left out: {error}", file=sys.stderr)
            return
        try:
            yield "FA3"
        finally:
            restore_flash_attention_impl()


@dataclass(frozen=True)
class Comparison:
    """Seconds of the same work, one by one, measured and as each workload predicts them."""

    what: str
    measured: list[float]
    predicted: dict[str, list[float]]


@dataclass(frozen=True)
class Result:
    """What a section found; ``problem`` is what must not be."""

    rows: list[Row]
    comparisons: list[Comparison] = field(default_factory=list)
    profile: WorkloadProfile | None = None
    problem: str | None = None


def measure(cases: Mapping[K, Case], setting: Setting) -> dict[K, Timing]:
    """Median seconds of every case, forward and backward, over interleaved rounds."""
    return measure_in_turns(cases, clock_of(torch.device(setting.device), PROCESS_TIME), setting.rounds)
