"""What a process of a test leaves that crashes: a core, which is kept, and its stack."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

KEPT = Path("results", "cores")  # in the directory of the tests
_LINES = 60  # of the stack


def allow_cores() -> None:
    """Let this process leave a core, in its working directory if ``/proc/sys/kernel/core_pattern`` is ``core``."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))


def kept_cores() -> str:
    """Keep the cores in the working directory; returns a line for each and, with gdb, the stack of its thread."""
    said = ""
    for core in [path for path in (Path("core"), *Path().glob("core.[0-9]*")) if path.is_file()]:
        KEPT.mkdir(parents=True, exist_ok=True)
        kept = core.replace(KEPT / f"core-{core.stat().st_mtime_ns}").absolute()
        said += f"its core is kept in {kept}\n"
        if gdb := shutil.which("gdb"):
            asked = [gdb, "-batch", "-ex", "bt", sys.executable, str(kept)]
            found = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False).stdout
            said += "\n".join(found.splitlines()[-_LINES:]) + "\n"
    return said
