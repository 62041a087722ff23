"""What every benchmark here shares: CPU time of alternatives in turn, and a description of the machine.

Plans are computed by one thread, so they are timed by the CPU time of the process: other work on the machine then costs
the caches it displaces, not the time it runs. The garbage collector stays on, as it is in training, but does not walk
what imports left behind: the peers' packages bring hundreds of thousands of objects, and going over them would be
charged to whichever method happens to set off a full collection. Alternatives take turns, so that a change of the
machine's speed meets all of them, and the median over turns is reported.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class CpuTimer:
    """Adds up the CPU seconds of the whole process, threads included, that calls take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[[T], R], argument: T) -> R:
        began = time.process_time()
        result = function(argument)
        self.seconds += time.process_time() - began
        return result


def freeze_imports() -> None:
    """Take everything that exists now out of garbage collection; call it once, after the imports."""
    gc.collect()
    gc.freeze()


def in_turns(alternatives: Mapping[str, Callable[[], T]], turns: int) -> dict[str, list[T]]:
    """What each alternative returns in each of ``turns`` turns, all of them called once in every turn."""
    results: dict[str, list[T]] = {name: [] for name in alternatives}
    for _ in range(turns):
        for name, measure in alternatives.items():
            gc.collect()  # what one alternative leaves behind is not charged to the next
            results[name].append(measure())
    return results


def machine() -> dict[str, str]:
    """CPU model, number of cores, operating system and Python; nothing that names the machine."""
    return {
        "cpu": _cpu_model(),
        "cores": str(os.cpu_count() or 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def versions(*distributions: str) -> dict[str, str]:
    """The installed ones of ``distributions``, with their versions."""
    found = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
