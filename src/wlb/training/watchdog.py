"""Ends a job that hangs, and says which rank is missing and in which collective the others wait for it.

Collectives of gloo and NCCL know that they wait, not for whom. So a thread of every rank looks at its main thread now
and then. When that has stood in one collective for ``training.timeout_seconds``, the thread raises the alarm in the
rendezvous store; the threads of all ranks then write there what their main threads are doing, and one puts the answers
together: who waits, who does something else, and who does not answer at all, because it is stopped or its machine is
gone. All ranks leave with that one line. The backends' own time limit is a little longer and remains for what this
cannot see: ranks that do not hang but were all suspended, for one. What a backend says then becomes one line as well.

What a thread is doing is read from its Python stack: it waits in a collective if it stands in a frame of
``torch.distributed``, or in one of our own few that wait for a transfer; the frame of ours that called it says what
for. So nothing is recorded while training runs, which pays one addition per micro-batch. A rank that computes, compiles
or writes a checkpoint does not raise the alarm, however long it takes; one that waits for it in a collective does.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path, PurePath
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

import wlb
from wlb.runtime.collectives import gathered
from wlb.training.failures import HungError, TrainingError, leave

_LONGEST_LOOK_SECONDS = 5.0  # between two looks at the main thread
_LOOKS_PER_LIMIT = 20
_ANSWER_SECONDS = 3.0  # beyond two looks, for ranks to answer an alarm
_STORE_SECONDS = 10.0  # in which a healthy store answers anything
_RANKS_NAMED = 16  # of one kind, in the message
# As gloo, its sockets, NCCL and the store put it in torch 2.11 to 2.13; none has a type of its own for it.
_TIMED_OUT = re.compile(r"\btim(ed|ing) out\b|\btimeout\b", re.IGNORECASE)
_LIMIT = re.compile(r"\b(\d+) ?ms\b")
_ORIGIN = re.compile(r"^\[\S+:\d+\] ")  # in front of what gloo says: the line of its source

_OURS = f"{Path(wlb.__file__).parent}/"  # the package's own directory: the checkout around it may be called wlb as well
_OUR_WAITS = f"{_OURS}attention/exchange.py"
_TORCH = f"{Path(torch.__file__).parent}/"
_TORCH_DISTRIBUTED = f"{_TORCH}distributed/"
_WRITES_FILES = f"{_TORCH_DISTRIBUTED}checkpoint/"  # its collectives are calls into distributed_c10d like any others
_WRAPPERS = {f"{_TORCH}{name}" for name in ("distributed/c10d_logger.py", "_ops.py", "utils/_contextlib.py")}
_FILE_PARTS_SHOWN = 3

Frames = tuple[tuple[int, int], ...]


def backend_timeout(limit_seconds: float) -> timedelta:
    """Time limit for collectives of the backend itself: long enough for the watchdog to speak first."""
    return timedelta(seconds=limit_seconds + 3 * _look_seconds(limit_seconds) + _ANSWER_SECONDS + _STORE_SECONDS)


class Pulse:
    """What the main thread counts, so that the same place reached again is not taken for standing still."""

    def __init__(self) -> None:
        self.beats = 0
        self.step = 0

    def beat(self, *_: object) -> None:
        self.beats += 1

    def begin(self, step: int) -> None:
        self.step = step
        self.beat()


class Activity(NamedTuple):
    """What the main thread of a rank is doing: ``place`` in words; ``waiting`` if that is inside a collective (or a
    send or receive)."""

    waiting: bool
    place: str
    step: int = 0


class Watchdog:
    """Watches the thread that creates it, on every rank of a job, until ``close``; ends the process in a hang."""

    def __init__(self, store: dist.Store, limit_seconds: float, pulse: Pulse) -> None:
        self._store = store
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._limit_seconds = limit_seconds
        self._pulse = pulse
        self._watched = threading.get_ident()
        self._look_seconds = _look_seconds(limit_seconds)
        self._answer_seconds = 2 * self._look_seconds + _ANSWER_SECONDS
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="wlb-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def give_way(self) -> None:
        """Let the verdict come first, if there is one: a rank whose peers have left fails in its main thread too."""
        try:
            if self._store.check(["alarm"]):
                self._thread.join()
        except RuntimeError:  # store unreachable; no verdict
            return

    def _watch(self) -> None:
        still_seconds, seen, looked = 0.0, None, time.monotonic()
        while not self._closed.wait(self._look_seconds):
            # If this whole process was stopped for a while, its main thread is not to blame for that time.
            since, looked = min(time.monotonic() - looked, 2 * self._look_seconds), time.monotonic()
            found: tuple[int, Frames] = (self._pulse.beats, stack_of(self._watched))
            still_seconds, seen = (still_seconds + since if found == seen else 0.0), found
            alarm = hung = still_seconds >= self._limit_seconds and activity_of(self._watched).waiting
            try:
                alarm = hung or self._store.check(["alarm"])
                if alarm:
                    leave(HungError(self._settle(hung)))
            except RuntimeError:  # the store is gone; that alone is no reason to stop, as nothing else needs it now
                if alarm:
                    alone = describe_hang({self._rank: self._report()}, 1, self._limit_seconds)
                    gone = "the rendezvous store is unreachable: its machine is stopped or cut off"
                    leave(HungError(f"{alone}; {gone}"))

    def _settle(self, hung: bool) -> str:
        """Report, and return what all reports together say."""
        self._store.set(f"report/{self._rank}", json.dumps(self._report()))
        if hung and self._store.add("alarm", 1) == 1:
            verdict = describe_hang(self._answers(), self._world_size, self._limit_seconds)
            self._store.set("verdict", verdict)
            time.sleep(self._look_seconds)  # others read it; the store may live in this process
            return verdict
        self._store.wait(["verdict"], timedelta(seconds=2 * self._answer_seconds + _STORE_SECONDS))
        return self._store.get("verdict").decode()

    def _answers(self) -> dict[int, Activity]:
        deadline = time.monotonic() + self._answer_seconds
        keys = {rank: f"report/{rank}" for rank in range(self._world_size)}
        while not self._store.check(list(keys.values())) and time.monotonic() < deadline:
            time.sleep(self._look_seconds / 4)
        present = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: Activity(*json.loads(self._store.get(key))) for rank, key in present.items()}

    def _report(self) -> Activity:
        return activity_of(self._watched)._replace(step=self._pulse.step)


@contextmanager
def watched(limit_seconds: float, pulse: Pulse) -> Iterator[None]:
    """Watch this rank inside the block, which every rank enters in its main thread after the ranks have met.

    A rank alone has nobody to wait for and is not watched.
    """
    if dist.get_world_size() == 1:
        yield
        return
    # A connection of its own: the main thread may hang in the middle of using the other one.
    client = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=_STORE_SECONDS),
        wait_for_workers=False,
    )
    attempt = gathered(f"{os.getpid()}-{time.time_ns()}")[0]  # the store may outlive a restart
    watchdog = Watchdog(dist.PrefixStore(f"wlb-watchdog/{attempt}", client), limit_seconds, pulse)
    try:
        yield
    except Exception:
        watchdog.give_way()
        raise
    watchdog.close()


@contextmanager
def time_outs_are_hangs(limit_seconds: float, pulse: Pulse) -> Iterator[None]:
    """Raise ``HungError`` where a backend, or the store, gives up waiting for other ranks inside the block."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, TrainingError) or not _TIMED_OUT.search(str(error)):
            raise
        raise HungError(describe_time_out(error, pulse.step, limit_seconds)) from error


def describe_time_out(error: RuntimeError, step: int, limit_seconds: float) -> str:
    """One line: where this rank waited for how long, and what the backend said when it gave up."""
    said = _ORIGIN.sub("", str(error).splitlines()[0])
    place = _activity([frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]).place
    limit = f"{limit_seconds:g} s (training.timeout_seconds)"
    if (found := _LIMIT.search(said)) and int(found[1]) != backend_timeout(limit_seconds) // timedelta(milliseconds=1):
        limit = f"{int(found[1]) / 1000:g} s"  # not the limit that follows from the setting
    return (
        f"no progress for {limit}: rank {os.environ.get('RANK', '0')} waited in {place}, step {step}: "
        f"{said}; ranks were suspended, or cannot reach each other"
    )


def describe_hang(reports: Mapping[int, Activity], world_size: int, limit_seconds: float) -> str:
    """One line: who does not answer, where those are that wait in no collective, and in which ones the others wait."""
    silent = [rank for rank in range(world_size) if rank not in reports]
    alike: dict[Activity, list[int]] = {}
    for rank, report in sorted(reports.items()):
        alike.setdefault(report, []).append(rank)
    parts = [f"{_ranks(silent, 'does', 'do')} not answer (stopped, or its machine is gone)"] if silent else []
    for report, ranks in sorted(alike.items(), key=lambda item: item[0].waiting):
        verb = (
            _ranks(ranks, "waits", "wait") if report.waiting else f"{_ranks(ranks, 'is', 'are')} in no collective but"
        )
        parts.append(f"{verb} in {report.place}, step {report.step}")
    return f"no progress for {limit_seconds:g} s (training.timeout_seconds): {'; '.join(parts)}"


def _ranks(ranks: list[int], one: str, many: str) -> str:
    named = ", ".join(map(str, ranks[:_RANKS_NAMED]))
    more = f" and {len(ranks) - _RANKS_NAMED} more" if len(ranks) > _RANKS_NAMED else ""
    return f"rank {named} {one}" if len(ranks) == 1 else f"ranks {named}{more} {many}"


def _look_seconds(limit_seconds: float) -> float:
    return min(limit_seconds / _LOOKS_PER_LIMIT, _LONGEST_LOOK_SECONDS)


def stack_of(thread: int) -> Frames:
    """Where ``thread`` (a ``threading.get_ident``) is, to be compared: equal while it stands still."""
    return tuple((id(frame.f_code), frame.f_lasti) for frame in _frames(thread))


def activity_of(thread: int) -> Activity:
    """What ``thread`` is doing, in words."""
    frames = _frames(thread)
    return _activity(frames) if frames else Activity(False, "nowhere: its main thread has ended")


def _frames(thread: int) -> list[FrameType]:
    frame = sys._current_frames().get(thread)
    return [frame for frame, _ in traceback.walk_stack(frame)] if frame else []


def _activity(frames: list[FrameType]) -> Activity:
    """What a thread with these ``frames`` is doing; the innermost comes first."""
    frames = [frame for frame in frames if _file(frame) not in _WRAPPERS] or frames
    innermost, file = frames[0], _file(frames[0])
    ours = next((frame for frame in frames if _file(frame).startswith(_OURS)), innermost)
    waiting = file == _OUR_WAITS or (file.startswith(_TORCH_DISTRIBUTED) and not file.startswith(_WRITES_FILES))
    caller = "" if ours is innermost else f", {'called from' if waiting else 'inside'} {_place(ours)}"
    return Activity(waiting, _place(innermost) + caller)


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _place(frame: FrameType) -> str:
    file = _file(frame)
    ours = file.startswith(_OURS)
    shown = f"wlb/{file[len(_OURS) :]}" if ours else "/".join(PurePath(file).parts[-_FILE_PARTS_SHOWN:])
    return f"{frame.f_code.co_name} ({shown}:{frame.f_lineno})"
