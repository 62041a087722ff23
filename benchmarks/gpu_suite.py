"""Everything here that only a GPU can tell, measured by one command on one H100 or H200 in under 8 minutes.

    python benchmarks/gpu_suite.py [--sections NAME,..] [--out FILE]
    python benchmarks/gpu_suite.py --device cpu --quick                  # tries the code, at toy sizes

Sections: ``exactness`` of the attention back end, ``kernel`` times over queries and keys, the workload ``profile`` of a
block, ``sharding`` (attention of every context-parallel rank), ``packing`` (micro-batches of every packer). Seconds are
compared with what the workload model predicts: the preset of this hardware, and the profile where it was measured. The
project must be installed, or its sources be on PYTHONPATH.

One JSON file has all of it, written after every section, so that a run that is cut short leaves what it had. A section
that fails is named, the others run, and the exit status is 1. ``wlb compare --profile FILE`` and its like read the
profile in it.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from parts.gpu.attention import exactness, kernel
from parts.gpu.packing import packing
from parts.gpu.profile import PROFILE, profile
from parts.gpu.report import Report
from parts.gpu.setting import H100, TOY, Result, Setting, Workloads
from parts.gpu.sharding import sharding
from wlb.training.runtime.environment import hardware_name
from wlb.workload import Workload, make_workload

SECTIONS: dict[str, Callable[[Setting, Workloads], Result]] = {
    "exactness": exactness,
    "kernel": kernel,
    "profile": profile,
    "sharding": sharding,
    "packing": packing,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    names = options.sections.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        return _refuse(f"no section {unknown[0]!r}; choose from {', '.join(SECTIONS)}")
    if options.device == "cpu" and not options.quick:
        return _refuse("the CPU runs toy sizes only; add --quick")
    if options.device == "cuda" and not torch.cuda.is_available():
        return _refuse("PyTorch finds no CUDA device; --device cpu --quick tries the code without one")
    return run([name for name in SECTIONS if name in names], setting_for(options.device, options.quick), options.out)


def setting_for(device: str, quick: bool) -> Setting:
    if not quick:
        return H100
    return replace(TOY, device=device, dtype=H100.dtype if device == "cuda" else TOY.dtype)


def run(names: Sequence[str], setting: Setting, out: Path) -> int:
    """Measure the sections one after another; returns the exit status."""
    if setting.device == "cpu":
        torch.set_num_threads(1)  # whose CPU time is measured
    preset = hardware_name(torch.device(setting.device))
    workloads: dict[str, Workload] = {f"{preset} preset": make_workload(setting.shape, preset)}
    report = Report(setting, out)
    for name in names:
        began = time.perf_counter()
        result = _try(name, setting, workloads)
        report.add(name, time.perf_counter() - began, result)
        if result.profile is not None:
            workloads[PROFILE] = result.profile.workload()
        _free_memory(setting)
    report.conclude()
    return int(report.failed)


def _try(name: str, setting: Setting, workloads: Workloads) -> Result:
    """The section's result, or one that says why there is none; the other sections need not be run again for it."""
    try:
        return SECTIONS[name](setting, workloads)
    except Exception as error:
        traceback.print_exc()
        return Result([], problem=f"{type(error).__name__}: {error}")


def _free_memory(setting: Setting) -> None:
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()


def _refuse(reason: str) -> int:
    print(f"gpu_suite: error: {reason}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="toy sizes: tries every section in seconds")
    parser.add_argument("--out", type=Path, default=Path("results/gpu_suite.json"), help="where results go, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
