"""Real processes of one thread each: ranks of a benchmark on this machine's CPU, joined by gloo, or on its GPUs."""

import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing

from wlb.runtime.environment import set_up_gpu

R = TypeVar("R")
_TIMEOUT = timedelta(minutes=30)


def on_ranks(processes: int, function: Callable[..., R], *arguments: Any, device: str = "cpu") -> list[R]:
    """What ``function(*arguments)`` returns on each of so many ranks of a new process group, one a GPU on "cuda"."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run, (processes, folder, device, function, arguments), nprocs=processes)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(processes)]


def _run(
    rank: int, processes: int, folder: str, device: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store, backend = f"file://{folder}/store", "gloo"
    if device == "cuda":
        set_up_gpu()
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=processes, timeout=_TIMEOUT)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(function(*arguments)))
    dist.barrier()
    dist.destroy_process_group()
