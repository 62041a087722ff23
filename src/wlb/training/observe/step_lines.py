"""Files of JSON lines, one for each step, that a job which continues cuts back to its checkpoint.

Only their ends are read, so this takes as long after ten million steps as after ten.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

_BLOCK_BYTES = 1 << 16


def continue_file(path: Path, last_step: int) -> str | None:
    """Make ``path`` end with ``last_step``, or set it aside for a new job (0); what was done, if anything was."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    if last_step == 0:
        aside = next(name for n in range(1, 10**6) if not (name := path.with_suffix(f".{n}.jsonl")).exists())
        os.replace(path, aside)
        return f"metrics of an earlier run are now in {aside}"
    size, removed = path.stat().st_size, 0
    for start, line in _lines_from_end(path):
        if _step_of(line) <= last_step:
            break
        size, removed = start, removed + 1
    if not removed:
        return None
    os.truncate(path, size)
    return f"{path} goes back to step {last_step}, later lines removed: {removed}"


def last_step_in(path: Path) -> int:
    """The step of the last line; 0 without one."""
    if not path.exists():
        return 0
    return next((int(_step_of(line)) for _, line in _lines_from_end(path)), 0)


def _lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines, the last one first, each with the number of bytes before it."""
    with path.open("rb") as file:
        start = position = file.seek(0, os.SEEK_END)
        beginning = b""  # what is known so far of the line that begins before position
        while position:
            size = min(_BLOCK_BYTES, position)
            position -= size
            file.seek(position)
            beginning, *lines = (file.read(size) + beginning).splitlines(keepends=True)
            for line in reversed(lines):
                start -= len(line)
                yield start, line
        if beginning:
            yield 0, beginning


def _step_of(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line cut short when its writer was killed
