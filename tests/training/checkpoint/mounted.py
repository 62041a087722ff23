"""``python -m tests.training.checkpoint.mounted MOUNT DIRECTORY ARGUMENTS`` is ``wlb ARGUMENTS`` with its own mount.

MOUNT is a shell command on DIRECTORY, ``$1``. What the directory holds in the end is printed, as nothing else sees it.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from wlb.__main__ import main

FORBIDDEN, FAILED = 99, 98  # exit statuses: this system lets nobody mount, MOUNT failed
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000  # linux/sched.h


def _may_mount() -> bool:
    """Whether this process could enter a mount namespace in which it is root."""
    user, group = os.geteuid(), os.getegid()
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS | _CLONE_NEWUSER):
        return False
    for file, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", file).write_text(content, encoding="ascii")
    probe = "mount --make-rprivate / && mount -t tmpfs tmpfs /mnt"
    return not subprocess.run(["sh", "-c", probe], capture_output=True).returncode


if __name__ == "__main__":
    mount, directory, *sys.argv[1:] = sys.argv[1:]
    if not _may_mount():
        sys.exit(FORBIDDEN)
    if subprocess.run(["sh", "-c", mount, "sh", directory]).returncode:
        sys.exit(FAILED)
    try:
        main()
    finally:
        print(*sorted(os.listdir(directory)))
