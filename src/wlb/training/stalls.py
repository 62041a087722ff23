"""Finds the ranks that hold up the others when a collective times out.

A rank that times out does not know which rank it waits for. So it sets an alarm in the rendezvous store, and a thread
of every rank answers with the place of its main thread in the code. The message names each rank that is in no
collective or does not answer. Nothing can be saved then, so ranks give up their grace time, and a stopped one is
continued, or it could not end. Under NCCL collectives run on the GPU, and PyTorch's flight recorder has those that a
rank has begun and not ended. NCCL raises nothing: a minute after a time-out it ends the process. But it sets a key in
the store first, and a thread that waits for the key names the ranks and ends this one before.
"""

import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from wlb.training.process import HungError, Termination, TrainingError, leave

_ANSWER_SECONDS = 5.0
# The words of gloo, its sockets and the store in torch 2.11 to 2.13; none has an exception type for it.
_TIMED_OUT = re.compile(r"\btim(ed|ing) out\b|\btimeout\b", re.IGNORECASE)
_COLLECTIVE = re.compile(r"/torch/distributed/(?!checkpoint/)|/wlb/attention/exchange\.py$")
_INNERMOST = 3  # frames: a collective may be called through torch/_ops.py and a decorator
_NCCL_TIMED_OUT = "exception_dump"  # kStoreDumpKey of ProcessGroupNCCL.hpp in torch 2.11 to 2.15
_DUMP_SECONDS = 3.0  # in which NCCL writes its flight recorder; it looks at the key once a second
_SILENT, _WAITS = b"does not answer (stopped, or its machine is gone)", b"waits"


def record_flight(directory: Path) -> None:
    """Have NCCL write its last collectives into ``directory`` on a time-out, unless the environment says otherwise."""
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{directory.absolute()}/flight_")


@contextmanager
def stalls_named(limit_seconds: float, termination: Termination) -> Iterator[None]:
    """Raise ``HungError`` if a collective inside the block times out; all ranks enter it after the rendezvous."""
    # Connections of their own: the main thread may hang while it uses the store.
    store, alarm, nccl = (dist.distributed_c10d._get_default_store().clone() for _ in range(3))  # type: ignore[attr-defined]
    store.set(f"process/{dist.get_rank()}", f"{socket.gethostname()} {os.getpid()}")
    threading.Thread(target=_answer, args=(alarm, threading.get_ident(), termination), daemon=True).start()
    threading.Thread(target=_leave_before_nccl, args=(nccl, limit_seconds, termination), daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        termination.lost = not isinstance(error, TrainingError)
        if not termination.lost or not _TIMED_OUT.search(str(error)):
            raise
        raise _verdict(store, limit_seconds, termination) from error


def _answer(store: dist.Store, main_thread: int, termination: Termination) -> None:
    with suppress(RuntimeError):  # the store is gone, and so is the job
        store.wait(["alarm"], timedelta.max / 2)
        termination.hung.set()
        *_, place = stack = traceback.extract_stack(sys._current_frames()[main_thread])
        in_collective = any(_COLLECTIVE.search(frame.filename) for frame in stack[-_INNERMOST:])
        waits = in_collective or termination.lost or _unfinished()
        answer = _WAITS if waits else f"is in {place.name} ({Path(place.filename).name}:{place.lineno})".encode()
        store.set(f"answer/{dist.get_rank()}", answer)  # type: ignore[arg-type]  # bytes are as good as a string


def _leave_before_nccl(store: dist.Store, limit_seconds: float, termination: Termination) -> None:
    with suppress(RuntimeError):  # the store is gone, and so is the job
        signalled: dist.Store = store._underlying_non_prefix_store.clone()  # type: ignore[attr-defined]
        signalled.wait([_NCCL_TIMED_OUT], timedelta.max / 2)
        now = time.time_ns()
        if any(now - entry["time_created_ns"] > entry["timeout_ms"] * 1e6 for entry in _unfinished()):
            error = _verdict(store, limit_seconds, termination)
            time.sleep(_DUMP_SECONDS)
            leave(error)


def _unfinished() -> list[dict[str, Any]]:
    """The flight recorder's entries of what this rank has begun under NCCL and not ended; none without NCCL."""
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    entries = pickle.loads(dump(True, False, True)).get("entries", []) if dump else []
    return [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]


def _verdict(store: dist.Store, limit_seconds: float, termination: Termination) -> HungError:
    limit = f"step {termination.step} did not end within training.timeout_seconds = {limit_seconds:g} s"
    return HungError(f"{limit}: {_missing(store)}")


def _missing(store: dist.Store) -> str:
    """Which ranks hold up the others, and where they are."""
    keys = {rank: f"answer/{rank}" for rank in range(dist.get_world_size()) if rank != dist.get_rank()}
    missing: dict[bytes, list[str]] = {}
    try:
        store.set("alarm", "")
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and not store.check([*keys.values()]):
            time.sleep(0.05)
        for rank, key in keys.items():
            missing.setdefault(store.get(key) if store.check([key]) else _SILENT, []).append(str(rank))
        for process in [f"process/{rank}" for rank in missing.get(_SILENT, ())]:
            machine, number = store.get(process).decode().split() if store.check([process]) else ("", "")
            if machine == socket.gethostname():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(int(number), signal.SIGCONT)
    except RuntimeError:
        return "the rendezvous store does not answer either: its machine is stopped or gone"
    missing.pop(_WAITS, None)
    named = [f"rank {', '.join(ranks)} {place.decode()}" for place, ranks in missing.items()]
    return "; ".join(named) or "all ranks wait in collectives: they were suspended, or cannot reach each other"
