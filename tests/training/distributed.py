"""Start a few real processes joined by gloo, run one function in each, and hand back what they return.

``run_ranks(4, function, *arguments)`` calls ``function(*arguments)`` in four processes that already share a
process group, and returns the four results in rank order. The function lives at the top level of a module and
its arguments and results pickle. Nothing can hang: collectives time out, so does the whole call, the first
rank that fails takes the others with it, and its traceback is the test's failure.

Processes are forked from a server that has imported once what they need (``tests.programs``), so that starting eight
costs little.
"""

import faulthandler
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.cores import allow_cores, kept_cores
from tests.limits import HUNG_SECONDS
from tests.programs import FORKS


class RankFailure(AssertionError):
    """A process raised, died or ran out of time."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = HUNG_SECONDS
) -> list[Any]:
    """Call ``function(*arguments)`` in ``world_size`` gloo processes; results in rank order.

    Raises ``RankFailure`` with the traceback of the first rank that fails, or after ``seconds``.
    """
    # Plain pickle: the one that processes are started with would share each tensor through a file descriptor.
    call = pickle.dumps((function, arguments))
    with tempfile.TemporaryDirectory() as folder:
        receivers: list[Connection] = []
        processes = []
        for rank in range(world_size):
            receiver, sender = FORKS.Pipe(duplex=False)
            process = FORKS.Process(
                target=_run_rank,
                args=(rank, world_size, Path(folder) / "store", seconds, sender, call),
                daemon=True,
            )
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        deadline = time.monotonic() + seconds
        try:
            results = _collect(receivers, processes, deadline)
            for rank, process in enumerate(processes):
                process.join(max(0.0, deadline - time.monotonic()))
                if process.exitcode != 0:  # its result counts all the same
                    warnings.warn(f"rank {rank} left its process group with {_end_of(process)}", stacklevel=2)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    return results


def _end_of(process: BaseProcess) -> str:
    process.join(HUNG_SECONDS)
    return f"exit code {process.exitcode}; {kept_cores()}"


def _collect(receivers: list[Connection], processes: Sequence[BaseProcess], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(f"ranks {sorted(waiting.values())} ran out of time")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting.pop(receiver)
            try:
                failure, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                raise RankFailure(f"rank {rank} died without a message: {_end_of(processes[rank])}") from None
            if failure:
                raise RankFailure(f"rank {rank} failed:\n{failure}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _run_rank(
    rank: int,
    world_size: int,
    store: Path,
    seconds: float,
    sender: Connection,
    call: bytes,
) -> None:
    faulthandler.enable()  # a rank that crashes says where
    allow_cores()
    try:
        function, arguments = pickle.loads(call)
        _join(store, rank, world_size, seconds)
        outcome = ("", function(*arguments))
    except Exception:
        outcome = (traceback.format_exc(), None)
    sender.send_bytes(pickle.dumps(outcome))  # first, because threads of torch may crash where they end
    if not outcome[0]:
        dist.barrier()
        dist.destroy_process_group()


def _join(store: Path, rank: int, world_size: int, seconds: float) -> None:
    timeout = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)


def join_again(store: Path) -> None:
    """Leave the process group and join the same ranks in a new one, which meet in the file ``store``.

    A collective is over a moment before gloo's thread lets go of its tensors. Leaving ends the threads, so afterwards
    only what Python holds is held.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    _join(store, rank, world_size, HUNG_SECONDS)
