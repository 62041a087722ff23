"""What a thread is doing right now, read from its Python stack by another thread.

Nothing is recorded while training runs: ``sys._current_frames`` shows the frames of every thread at the moment it is
asked. A thread that waits in a collective stands in a frame of ``torch.distributed``, or in one of our own few that
wait for a transfer; the frame of ours that called it says what for.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path, PurePath
from types import FrameType
from typing import NamedTuple

import torch

import wlb

_OURS = f"{Path(wlb.__file__).parent}/"  # the package's own directory: the checkout around it may be called wlb as well
_OUR_WAITS = f"{_OURS}attention/exchange.py"
_TORCH = f"{Path(torch.__file__).parent}/"
_TORCH_DISTRIBUTED = f"{_TORCH}distributed/"
_WRITES_FILES = f"{_TORCH_DISTRIBUTED}checkpoint/"  # its collectives are calls into distributed_c10d like any others
_WRAPPERS = {f"{_TORCH}{name}" for name in ("distributed/c10d_logger.py", "_ops.py", "utils/_contextlib.py")}
_FILE_PARTS_SHOWN = 3

Stack = tuple[tuple[int, int], ...]


class Whereabouts(NamedTuple):
    """``place`` in words; ``waiting`` if that is inside a collective (or a send or receive)."""

    waiting: bool
    place: str


def stack_of(thread: int) -> Stack:
    """Where ``thread`` (a ``threading.get_ident``) is, to be compared: equal while it stands still."""
    return tuple((id(frame.f_code), frame.f_lasti) for frame in _frames(thread))


def whereabouts_of(thread: int) -> Whereabouts:
    """What ``thread`` is doing, in words."""
    frames = list(_frames(thread))
    return _whereabouts(frames) if frames else Whereabouts(False, "nowhere: its main thread has ended")


def place_of_error(error: BaseException) -> str:
    """Where ``error`` was raised, in the same words."""
    return _whereabouts([frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]).place


def _whereabouts(frames: list[FrameType]) -> Whereabouts:
    """``frames`` in words; the innermost comes first."""
    frames = [frame for frame in frames if _file(frame) not in _WRAPPERS] or frames
    innermost = frames[0]
    ours = next((frame for frame in frames if _file(frame).startswith(_OURS)), None)
    file = _file(innermost)
    if file == _OUR_WAITS or (file.startswith(_TORCH_DISTRIBUTED) and not file.startswith(_WRITES_FILES)):
        called_from = f", called from {_place(ours)}" if ours not in (None, innermost) else ""
        return Whereabouts(True, f"{_place(innermost)}{called_from}")
    inside = f", inside {_place(ours)}" if ours not in (None, innermost) else ""
    return Whereabouts(False, f"{_place(innermost)}{inside}")


def _frames(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _place(frame: FrameType | None) -> str:
    assert frame is not None
    file = _file(frame)
    ours = file.startswith(_OURS)
    shown = f"wlb/{file[len(_OURS) :]}" if ours else "/".join(PurePath(file).parts[-_FILE_PARTS_SHOWN:])
    return f"{frame.f_code.co_name} ({shown}:{frame.f_lineno})"
