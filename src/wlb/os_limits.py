"""The cores and memory that the operating system lets this process use."""

import os
from pathlib import Path


def usable_cores() -> int:
    """The CPU cores this process may use: job schedulers bind processes to some, but not every system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_memory() -> int:
    """The bytes of memory this job may use: of the machine, or less if a container or job scheduler limits it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *control_group_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def control_group_limits(membership: Path, root: Path) -> list[int]:
    """The memory limits in bytes of this process's control group and of all above it (cgroup version 2, or 1)."""
    limits: list[int] = []
    try:
        for line in membership.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
            path = top / group.lstrip("/")
            files = [folder / name for folder in (path, *path.parents) if folder.is_relative_to(top)]
            texts = [file.read_text(encoding="utf-8").strip() for file in files if file.is_file()]  # not at the top
            limits += [int(text) for text in texts if text.isdecimal()]  # "max" is none
    except (OSError, ValueError):
        return []
    return limits
