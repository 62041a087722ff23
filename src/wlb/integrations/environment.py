"""What an environment has for training with WLB: packages that import, GPUs, settings, and what would fail.

``wlb doctor`` prints it. ``tested.json`` has what was tested with which versions.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.resources import files
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

# By the name on the package index, the module whose import fails where training would: our adapter, or what it adapts.
STACKS = {
    "torch": "wlb.attention",
    "transformers": "wlb.integrations.huggingface",
    "trl": "trl",
    "accelerate": "wlb.integrations.accelerate",
    "axolotl": "wlb.integrations.axolotl",
    "llamafactory": "llamafactory.train.sft.workflow",
    "ms-swift": "swift.trainers",
    "lightning": "lightning",
    "torchtitan": "wlb.integrations.torchtitan",
    "megatron-core": "wlb.integrations.megatron",
    "verl": "wlb.integrations.verl",
}
KERNELS = {
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
    "causal-conv1d": "causal_conv1d",
    "flash-linear-attention": "fla",
    "mamba-ssm": "mamba_ssm",
}
_IMPORT = """
import contextlib, importlib, os, sys
try:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        importlib.import_module(sys.argv[1])
except BaseException as error:
    print(f"{type(error).__name__}: {error}")
"""
_LONGEST_IMPORT = 120  # seconds
_EXTRAS = ("", "data", "train", "hf", "axolotl", "lightning", "ray", "remote")  # which a user installs
ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_LEAST_NCCL, _LEAST_GPU = (2, 26), (8, 0)  # the first to read ORDER; Ampere, the first with FlashAttention


def find_packages() -> dict[str, dict[str, Any]]:
    """Each installed package: its version, the error of its import, and what was tested with this version or others."""
    modules, installed = STACKS | KERNELS, {}
    for name in modules:
        with suppress(PackageNotFoundError):
            installed[name] = version(name) or "unknown"  # None where an installation was interrupted
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        errors = threads.map(_import_error, (modules[name] for name in installed))
    tested = json.loads(files("wlb.integrations").joinpath("tested.json").read_text(encoding="utf-8"))
    return {
        name: {"version": installed[name], "error": error, **_tested(tested, name, installed[name].partition("+")[0])}
        for name, error in zip(installed, errors, strict=True)
    }


def _tested(tested: Sequence[Mapping[str, Any]], name: str, found: str) -> dict[str, Any]:
    """What ran with the package ``name``, in the version ``found`` and in others."""
    of_stack = [one for one in tested if one["stack"].lower().replace("-", "") == name.replace("-", "")]
    return {
        "tested": next((one["features"] for one in of_stack if one["version"] == found), {}),
        "ran": any(one["pins"].get(name) == found for one in of_stack),  # and not its pins alone
        "tested_versions": [one["version"] for one in of_stack],
        "ran_in": [f"{one['stack']} {one['version']}" for one in tested if one["pins"].get(name) == found],
    }


def _import_error(module: str) -> str:
    """What importing ``module`` fails with, in one line; empty if it works. A crash stays in its own process."""
    command = [sys.executable, "-W", "ignore", "-c", _IMPORT, module]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_IMPORT, check=False)
    except subprocess.TimeoutExpired:
        return f"import {module} takes over {_LONGEST_IMPORT} s"
    crashed = f"import {module} ends the process with status {done.returncode}" if done.returncode else ""
    return crashed or " ".join(done.stdout.split())


def find_gpus() -> dict[str, Any]:
    """GPUs, and the settings that training on them reads."""
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "gpus": [gpu.name for gpu in gpus],
        "capabilities": [(gpu.major, gpu.minor) for gpu in gpus],
        "cuda": torch.version.cuda,
        "nccl": torch.cuda.nccl.version() if gpus and torch.distributed.is_nccl_available() else None,
        "settings": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("NCCL_", "PYTORCH_"))},
    }


def wrong_versions() -> Iterator[str]:
    """Installed packages in versions that ours does not work with."""
    try:
        required = [*map(Requirement, requires("wlb-llm") or ())]
    except PackageNotFoundError:  # a source tree on the path
        return
    for one in required:
        of_user = one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in _EXTRAS)
        with suppress(PackageNotFoundError, InvalidVersion):  # not installed, or of a version that nobody can compare
            found = version(one.name) or ""
            if of_user and found and not one.specifier.contains(Version(found), prereleases=True):
                yield f"{one.name} {found}: wlb-llm needs {one.name}{one.specifier}"


def wrong_gpus(device: Mapping[str, Any]) -> Iterator[str]:
    """What the GPUs of ``find_gpus`` and its settings cannot do."""
    for name, capability in {*zip(device.get("gpus", ()), device.get("capabilities", ()), strict=True)}:
        if capability < _LEAST_GPU:
            yield f"{name}: FlashAttention needs compute capability 8.0, this GPU has {'.'.join(map(str, capability))}"
    if (nccl := device.get("nccl")) and nccl[:2] < _LEAST_NCCL:
        yield f"NCCL {'.'.join(map(str, nccl))} ignores {ORDER}; use 2.26 or later, or ranks may deadlock"
    if device.get("settings", {}).get(ORDER, "1") != "1":
        yield f"{ORDER} = {device['settings'][ORDER]}: ranks that share micro-batches may deadlock; unset it"
