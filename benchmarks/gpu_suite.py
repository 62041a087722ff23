"""Everything here that only GPUs can tell, measured by one command: on one of them, and where there are more on all.

    python -m benchmarks.gpu_suite [--sections NAME,..] [--out FILE]
    python -m benchmarks.gpu_suite --device cpu --quick                  # tries the code, at toy sizes

Sections: ``exactness`` of the attention back end, ``kernel`` times over queries and keys, the workload ``profile`` of a
block, ``sharding`` (attention of every context-parallel rank), a training ``step`` (MFU, memory beside its prediction,
the bits of two runs), a layer of ``experts``, and on two or more GPUs the ``exchange`` of keys and values, and
``levels``, level steps beside lock step. Attention runs on FlashAttention 2 and, where it is installed, 3. Seconds are
compared with what the workload model predicts: the preset of this hardware, and the profile where it was measured. Both
packages of the project must be installed, or their sources be on PYTHONPATH.

One JSON file has all of it, written after every section, so that a run that is cut short leaves what it had. A section
that fails is named, the others run, and the exit status is 1. ``wlb check --profile FILE`` reads the profile in it.
"""

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.parts.gpu.attention import exactness, kernel
from benchmarks.parts.gpu.experts import experts
from benchmarks.parts.gpu.profile import PROFILE, profile
from benchmarks.parts.gpu.setting import H100, TOY, Comparison, Result, Row, Setting, Workloads
from benchmarks.parts.gpu.sharding import sharding
from benchmarks.parts.gpu.steps import exchange, levels, step
from benchmarks.parts.measurement import chosen, command, console, facts, make_parser, show, write
from wlb.errors import UserError
from wlb.training.environment import hardware_name
from wlb.workload import Costs, make_workload

DIGITS = 5  # of a number in the file
SECTIONS: dict[str, Callable[[Setting, Workloads], Result]] = {
    "exactness": exactness,
    "kernel": kernel,
    "profile": profile,
    "sharding": sharding,
    "step": step,
    "experts": experts,
    "exchange": exchange,
    "levels": levels,
}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, out="results/gpu_suite.json")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="toy sizes: tries every section in seconds")
    options = parser.parse_args(arguments)
    names = chosen(options.sections, [*SECTIONS], "section")
    if options.device == "cpu" and not options.quick:
        raise UserError("the CPU runs toy sizes only; add --quick")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("PyTorch finds no CUDA device; --device cpu --quick tries the code without one")
    toy = replace(TOY, device=options.device, dtype=H100.dtype if options.device == "cuda" else TOY.dtype)
    return run([name for name in SECTIONS if name in names], toy if options.quick else H100, options.out)


def run(names: Sequence[str], setting: Setting, out: Path) -> int:
    """Measure the sections one after another, and write the file anew after each; returns the exit status."""
    if setting.device == "cpu":
        torch.set_num_threads(1)  # whose CPU time is measured
    preset = hardware_name(torch.device(setting.device))
    workloads: dict[str, Costs] = {f"{preset} preset": make_workload(setting.shape, preset)}
    content: dict[str, Any] = facts("torch", "triton")
    content["machine"] |= _device(setting)
    content |= {"setting": asdict(setting) | {"dtype": str(setting.dtype)}, "sections": {}}
    comparisons: list[Comparison] = []
    write(_rounded(content), out, indent=None)
    console.print(content["machine"], content["versions"])
    for name in names:
        began = time.perf_counter()
        result = _try(name, setting, workloads)
        seconds = time.perf_counter() - began
        comparisons += result.comparisons
        content["sections"][name] = {"seconds": seconds, "problem": result.problem, "rows": result.rows}
        content |= {"comparisons": [*map(asdict, comparisons)], "errors": _errors(comparisons)}
        if result.profile is not None:
            workloads[PROFILE] = make_workload(setting.shape, profile=result.profile)
            content["profile"] = result.profile.model_dump(mode="json", exclude_none=True)
        write(_rounded(content), out, indent=None)
        console.print(f"{name}, {seconds:.0f} s" + (f": {result.problem}" if result.problem else ""))
        show(name, result.rows)
        gc.collect()
        if setting.device == "cuda":
            torch.cuda.empty_cache()
    show("errors of predictions, as shares of what was measured", content["errors"])
    console.print(f"results: {out}")
    return int(any(section["problem"] for section in content["sections"].values()))


def _try(name: str, setting: Setting, workloads: Workloads) -> Result:
    """The section's result, or one that says why there is none; the other sections need not be run again for it."""
    try:
        return SECTIONS[name](setting, workloads)
    except Exception as error:
        traceback.print_exc()
        return Result([], problem=f"{type(error).__name__}: {error}")


def _device(setting: Setting) -> dict[str, str]:
    if setting.device == "cpu":
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": f"{properties.total_memory / 2**30:.0f}",
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": str(torch.version.cuda),
    }


def _errors(comparisons: Iterable[Comparison]) -> list[Row]:
    """Median, 90th percentile and worst error of every workload on every kind of work, over measured seconds."""
    rows = []
    for comparison in comparisons:
        for name, predicted in comparison.predicted.items():
            shares = np.abs(np.array(predicted) / np.array(comparison.measured) - 1)
            errors = {"median": np.median(shares), "p90": np.quantile(shares, 0.9), "worst": shares.max()}
            of_what = {"what": comparison.what, "workload": name, "count": len(predicted)}
            rows.append(of_what | {error: float(share) for error, share in errors.items()})
    return rows


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    sys.exit(main())
